/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file endpoint_and_backend.h
 * \brief The backend "nccl", for NVIDIA devices. NCCL is loaded when a session asks for it.
 */
#ifndef TVM_IPC_NCCL_ENDPOINT_AND_BACKEND_H_
#define TVM_IPC_NCCL_ENDPOINT_AND_BACKEND_H_

#include "core/communication_backend.h"

namespace tvm_ipc {

const Backend& Nccl();

}  // namespace tvm_ipc
#endif  // TVM_IPC_NCCL_ENDPOINT_AND_BACKEND_H_
