/* SPDX-License-Identifier: Apache-2.0 */
/*! \file probe.h
 *  \brief What pairs of devices can do, tried with sessions of two ranks in this process.
 */
#ifndef TVM_IPC_CUDA_PROBE_H_
#define TVM_IPC_CUDA_PROBE_H_

#include <string>
#include <vector>

namespace tvm_ipc::cuda {

/*!
 * \brief JSON: of each pair of the devices, in both orders, the way in which two ranks on them map
 *        memory, over which link, and why not in a better way. It makes contexts, and takes a
 *        second or so for each pair.
 */
std::string Probe(const std::vector<int>& devices);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_PROBE_H_
