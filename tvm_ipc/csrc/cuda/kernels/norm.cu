/* SPDX-License-Identifier: Apache-2.0 */
/*! \file norm.cu
 *  \brief The kernels that add a residual and normalise.
 */
#include "cuda/kernels/allreduce_norm_device_code.h"

namespace tvm_ipc {
namespace kernels {

#define TVM_IPC_NORMS(name, Type)                                    \
  TVM_IPC_KERNEL(tvm_ipc_push_norm_##name, NormArgs, PushNorm<Type>) \
  TVM_IPC_KERNEL(tvm_ipc_norm_##name, NormArgs, LocalNorm<Type>)

TVM_IPC_NORMS(float16, Float16)
TVM_IPC_NORMS(bfloat16, BFloat16)
TVM_IPC_NORMS(float32, Float32)

}  // namespace kernels
}  // namespace tvm_ipc
