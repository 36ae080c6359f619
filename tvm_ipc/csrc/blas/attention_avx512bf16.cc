/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file attention_avx512bf16.cc
 * \brief Attention of bfloat16 tensors with the instruction that multiplies pairs of them; compiled
 *        with AVX-512 and its bfloat16 extension enabled. Empty on other architectures.
 */
#include "blas/kernels_complementing_blas.h"

#if defined(__x86_64__)
#include "blas/kernels_attention_pairs.h"

namespace tvm_ipc {
namespace {

/*! \brief Keys and values of few rows as terms of PairAttention. */
struct PairOperands : PairAttention {
  static constexpr int64_t kKeyTerms = kLanes;
  static TVM_IPC_INLINE void LoadKeys(Floats* terms, const char* from, int64_t stride) {
    Isa::LoadTransposed(terms, from, stride);
  }
  static void LoadSomeKeys(Floats* terms, const char* from, int64_t stride, int64_t count,
                           int64_t width) {
    const auto some = static_cast<__mmask32>((uint64_t{1} << width) - 1);
    for (int64_t k = 0; k < kLanes; ++k) {
      terms[k] = k < count ? (Floats)_mm512_maskz_loadu_epi16(some, from + k * stride) : Floats{};
    }
    Isa::Transpose(terms);
  }
  static TVM_IPC_INLINE Floats TermOf(const Floats* loaded, int64_t k) { return loaded[k]; }
  static TVM_IPC_INLINE Floats LoadValues(const char* from, int64_t stride) {
    return Pairs(Isa::Load16(from), Isa::Load16(from + stride));
  }
  static TVM_IPC_INLINE Floats LoadSomeValues(const char* from, int64_t stride, int64_t count,
                                              int64_t width) {
    const __m256i odd = count > 1 ? Isa::Load16Part(from + stride, width) : _mm256_setzero_si256();
    return Pairs(Isa::Load16Part(from, width), odd);
  }
};

template <>
inline FewRowKernels FewRowKernelsOf<PairAttention>(FloatType, int64_t rows) {
  return FewRowKernels::Of<PairOperands>(rows);
}

}  // namespace

constexpr AttentionKernels kPairAttention = MakeAttentionKernels<PairAttention>();

}  // namespace tvm_ipc
#endif  // __x86_64__
