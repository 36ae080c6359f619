/* SPDX-License-Identifier: Apache-2.0 */
/*! \file probe_device_pair_sharing.h
 *  \brief Probe of the memory sharing between pairs of devices.
 */
#ifndef TVM_IPC_CUDA_PROBE_DEVICE_PAIR_SHARING_H_
#define TVM_IPC_CUDA_PROBE_DEVICE_PAIR_SHARING_H_

#include <string>
#include <vector>

namespace tvm_ipc::cuda {

/*!
 * \brief Return, as JSON, the sharing mode and the link of each pair of the devices, in both
 *        orders, and why no better mode works.
 *
 * The probe starts a session of two ranks in this process for each pair. It creates contexts on the
 * devices, and takes about a second per pair.
 */
std::string Probe(const std::vector<int>& devices);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_PROBE_DEVICE_PAIR_SHARING_H_
