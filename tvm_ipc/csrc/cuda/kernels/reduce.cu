/* SPDX-License-Identifier: Apache-2.0 */
/*! \file reduce.cu
 *  \brief The reduction kernels.
 */
#include "cuda/kernels/reduce_large_inputs_by_pull.h"

namespace tvm_ipc {
namespace kernels {

#define TVM_IPC_REDUCTIONS(name, Type)                                     \
  TVM_IPC_KERNEL(tvm_ipc_push_##name, ReduceArgs, Push<Type>)              \
  TVM_IPC_KERNEL(tvm_ipc_push_slices_##name, ReduceArgs, PushSlices<Type>) \
  TVM_IPC_KERNEL(tvm_ipc_pull_##name, ReduceArgs, Pull<Type>)              \
  TVM_IPC_KERNEL(tvm_ipc_parts_##name, PartsArgs, Parts<Type>)

TVM_IPC_REDUCTIONS(float16, Float16)
TVM_IPC_REDUCTIONS(bfloat16, BFloat16)
TVM_IPC_REDUCTIONS(float32, Float32)
TVM_IPC_REDUCTIONS(float64, Float64)
TVM_IPC_REDUCTIONS(int8, Int8)
TVM_IPC_REDUCTIONS(uint8, UInt8)
TVM_IPC_REDUCTIONS(int16, Int16)
TVM_IPC_REDUCTIONS(uint16, UInt16)
TVM_IPC_REDUCTIONS(int32, Int32)
TVM_IPC_REDUCTIONS(uint32, UInt32)
TVM_IPC_REDUCTIONS(int64, Int64)
TVM_IPC_REDUCTIONS(uint64, UInt64)
TVM_IPC_REDUCTIONS(bool, Bool)

}  // namespace kernels
}  // namespace tvm_ipc
