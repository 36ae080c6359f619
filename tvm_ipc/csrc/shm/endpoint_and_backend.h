/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file endpoint_and_backend.h
 * \brief The backend between CPUs of one machine, over memory that all workers map.
 */
#ifndef TVM_IPC_SHM_ENDPOINT_AND_BACKEND_H_
#define TVM_IPC_SHM_ENDPOINT_AND_BACKEND_H_

#include "core/communication_backend.h"

namespace tvm_ipc {

const Backend& SharedMemory();

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_ENDPOINT_AND_BACKEND_H_
