/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernel_table_of_instruction_set.h
 * \brief The kernels of kernels_complementing_blas.h for one instruction set.
 *
 * Included by a translation unit that first defines `Isa` with these members:
 *   kBytes, kLanes                   size and lanes of a vector of float32
 *   Raw16                            vector of kLanes 16-bit elements
 *   Load16, Load16Part               load all elements; load the first `count`, and zeros
 *   Store16, Store16Part             store all elements; store only the first `count`
 *   Load32Part, Store32Part          the same for float32
 *   WidenHalf, NarrowHalf            convert float16 to float32, and back to nearest even
 *   WidenBrain, Lower                convert bfloat16 to float32; take the lower halves of words
 *   Fma                              a * b + sum, rounded once where the processor has that
 *   Sum                              add the lanes
 *   Transpose                        transpose kLanes vectors of words in place
 *   LoadTransposed                   the same for kLanes vectors in memory
 */
#ifndef TVM_IPC_BLAS_KERNEL_TABLE_OF_INSTRUCTION_SET_H_
#define TVM_IPC_BLAS_KERNEL_TABLE_OF_INSTRUCTION_SET_H_

#include "blas/kernels_attention.h"
#include "blas/kernels_axpy_along_n.h"
#include "blas/kernels_epilogue.h"
#ifdef TVM_IPC_PACKED_KERNELS
#include "blas/kernels_float32_packed.h"
#endif

namespace tvm_ipc {
namespace {

#define TVM_IPC_SKINNY(type) {Axpy<type, 1>, Axpy<type, 2>, Axpy<type, 3>, Axpy<type, 4>}

constexpr BlasKernels MakeBlasKernels(const char* name) {
  return BlasKernels{
      name,
      {Widen<kFloat16>, Widen<kBFloat16>, Widen<kFloat32>},
      {TVM_IPC_SKINNY(kFloat16), TVM_IPC_SKINNY(kBFloat16), TVM_IPC_SKINNY(kFloat32)},
      {Dot<Widened<kFloat16>>, Dot<Widened<kBFloat16>>, Dot<Widened<kFloat32>>},
      Finish,
      MakeAttentionKernels<WidenedAttention>(),
#ifdef TVM_IPC_PACKED_KERNELS
      MakePackedKernels()
#else
      {}
#endif
  };
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNEL_TABLE_OF_INSTRUCTION_SET_H_
