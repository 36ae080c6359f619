/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_avx512bf16.cc
 * \brief The reductions of bfloat16 for AVX-512 with BF16, whose instruction rounds 32 floats at
 *        once; compiled with these enabled. Empty on other architectures.
 */
#if defined(__x86_64__)
#include "shm/reduce_avx512_intrinsics.h"
// Must follow the definition of Isa.
#include "shm/reduce_impl.h"

namespace tvm_ipc {
namespace {

/*! \brief bfloat16 that rounds with the BF16 instruction. The instruction treats subnormal sums as
 *         zeros, so Exact rounds them. */
struct RoundedBFloat16 : BFloat16 {
  using Exact = BFloat16;
  static constexpr bool kNormalsOnly = true;
  static TVM_IPC_INLINE unsigned Unusual(Vector v) {
    constexpr int kQuietNan = 0x01, kSubnormal = 0x20, kSignallingNan = 0x80;
    return _mm512_fpclass_ps_mask((Isa::F32)v, kQuietNan | kSubnormal | kSignallingNan);
  }
  static TVM_IPC_INLINE Raw Pack(const Vector* in) {
    return Isa::NarrowBFloat((Isa::F32)in[0], (Isa::F32)in[1]);
  }
};

}  // namespace

// The minimum and the maximum of bfloat16 elements need no rounding.
constexpr ReduceRow kAvx512BFloat16Row = {
    {Reduce<RoundedBFloat16, Sum>, Reduce<RoundedBFloat16, Product>, Reduce<BFloat16, Minimum>,
     Reduce<BFloat16, Maximum>, Reduce<RoundedBFloat16, Average>, nullptr, nullptr, nullptr,
     Reduce<RoundedBFloat16, TreeSum>}};
}  // namespace tvm_ipc
#endif  // __x86_64__
