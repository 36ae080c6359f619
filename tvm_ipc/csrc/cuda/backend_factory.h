/* SPDX-License-Identifier: Apache-2.0 */
/*! \file backend_factory.h
 *  \brief The backend "cuda": collectives between NVIDIA devices of one machine, by kernels of this
 *         library that use memory mapped by peers.
 */
#ifndef TVM_IPC_CUDA_BACKEND_FACTORY_H_
#define TVM_IPC_CUDA_BACKEND_FACTORY_H_

#include "core/communication_backend.h"

namespace tvm_ipc {

const Backend& Cuda();

}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_BACKEND_FACTORY_H_
