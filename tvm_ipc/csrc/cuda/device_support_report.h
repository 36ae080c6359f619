/* SPDX-License-Identifier: Apache-2.0 */
/*! \file device_support_report.h
 *  \brief Information about CUDA on this machine, which needs no context on any device.
 */
#ifndef TVM_IPC_CUDA_DEVICE_SUPPORT_REPORT_H_
#define TVM_IPC_CUDA_DEVICE_SUPPORT_REPORT_H_

#include <string>
#include <vector>

namespace tvm_ipc::cuda {

/*! \brief Return, as JSON, the driver, the devices, and whether the kernels run on them. Never
 *         throws. */
std::string Info();
/*! \brief Return why a session cannot have a rank on each of these devices, or "" if it can. */
std::string Refusal(const std::vector<int>& devices);

/*! \brief Return a text as a JSON string. */
std::string Quoted(const std::string& text);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_DEVICE_SUPPORT_REPORT_H_
