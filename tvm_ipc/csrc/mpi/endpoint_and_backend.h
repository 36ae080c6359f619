/* SPDX-License-Identifier: Apache-2.0 */
/*! \file endpoint_and_backend.h
 *  \brief The backend that moves data between CPUs of several nodes.
 */
#ifndef TVM_IPC_MPI_ENDPOINT_AND_BACKEND_H_
#define TVM_IPC_MPI_ENDPOINT_AND_BACKEND_H_

#include "core/communication_backend.h"

namespace tvm_ipc {

const Backend& Mpi();

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_ENDPOINT_AND_BACKEND_H_
