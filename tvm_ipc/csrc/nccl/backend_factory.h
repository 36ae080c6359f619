/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file backend_factory.h
 * \brief The backend "nccl", for NVIDIA devices. NCCL is loaded when a session asks for it.
 */
#ifndef TVM_IPC_NCCL_BACKEND_FACTORY_H_
#define TVM_IPC_NCCL_BACKEND_FACTORY_H_

#include "core/communication_backend.h"

namespace tvm_ipc {

const Backend& Nccl();

}  // namespace tvm_ipc
#endif  // TVM_IPC_NCCL_BACKEND_FACTORY_H_
