/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file backend_factory.h
 * \brief The backend between CPUs of one machine, over memory that all workers map.
 */
#ifndef TVM_IPC_SHM_BACKEND_FACTORY_H_
#define TVM_IPC_SHM_BACKEND_FACTORY_H_

#include "core/communication_backend.h"

namespace tvm_ipc {

const Backend& SharedMemory();

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_BACKEND_FACTORY_H_
