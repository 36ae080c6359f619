/* SPDX-License-Identifier: Apache-2.0 */
/*! \file info.h
 *  \brief What of CUDA is here, without a context on any device.
 */
#ifndef TVM_IPC_CUDA_INFO_H_
#define TVM_IPC_CUDA_INFO_H_

#include <string>
#include <vector>

namespace tvm_ipc::cuda {

/*! \brief JSON: the driver, the devices, and whether our kernels run on them. It never throws. */
std::string Info();
/*! \brief Why a session cannot have a rank on each of these devices, or nothing. */
std::string Refusal(const std::vector<int>& devices);

/*! \brief A text as JSON has it. */
std::string Quoted(const std::string& text);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_INFO_H_
