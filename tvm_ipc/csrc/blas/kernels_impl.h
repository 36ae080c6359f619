/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_impl.h
 * \brief The kernels of kernels.h for one instruction set.
 *
 * Included by a translation unit that defines `Isa` first:
 *   kBytes, kLanes                   of a vector of float32
 *   Raw16                            kLanes elements of 16 bits
 *   Load16, Load16Part               of memory; the second one so many, and zeros
 *   Store16, Store16Part             to memory; the second one only so many
 *   Load32Part, Store32Part          the same of float32
 *   WidenHalf, NarrowHalf            float16 to float32 and, to nearest even, back
 *   WidenBrain, Lower                bfloat16 to float32; the lower halves of words
 *   Sum                              of the lanes
 */
#ifndef TVM_IPC_BLAS_KERNELS_IMPL_H_
#define TVM_IPC_BLAS_KERNELS_IMPL_H_

#include "blas/kernels_epilogue.h"
#include "blas/kernels_rows.h"

namespace tvm_ipc {
namespace {

#define TVM_IPC_SKINNY(type) {Axpy<type, 1>, Axpy<type, 2>, Axpy<type, 3>, Axpy<type, 4>}

constexpr BlasKernels MakeBlasKernels(const char* name) {
  return BlasKernels{
      name,
      {Widen<kFloat16>, Widen<kBFloat16>, Widen<kFloat32>},
      {TVM_IPC_SKINNY(kFloat16), TVM_IPC_SKINNY(kBFloat16), TVM_IPC_SKINNY(kFloat32)},
      {Dot<Widened<kFloat16>>, Dot<Widened<kBFloat16>>, Dot<Widened<kFloat32>>},
      Finish};
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_IMPL_H_
