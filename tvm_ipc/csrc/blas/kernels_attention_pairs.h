/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_attention_pairs.h
 * \brief Operands of attention that are pairs of bfloat16; included by sources that are compiled
 *        with AVX-512 and its bfloat16 extension enabled.
 */
#ifndef TVM_IPC_BLAS_KERNELS_ATTENTION_PAIRS_H_
#define TVM_IPC_BLAS_KERNELS_ATTENTION_PAIRS_H_

#include "blas/isa_avx512.h"
#include "blas/kernels_attention.h"

namespace tvm_ipc {
namespace {

/*! \brief `Terms` of kernels_attention.h that are pairs of bfloat16, one in each half of a word. */
struct PairAttention {
  static constexpr int64_t kTerms = 2;
  static constexpr int64_t PackedWords(int64_t depth) { return (depth + 1) / 2; }

  static TVM_IPC_INLINE Floats Broadcast(const float* p) {
    int word;
    __builtin_memcpy(&word, p, 4);
    return (Floats)_mm512_set1_epi32(word);
  }
  static TVM_IPC_INLINE Floats Add(Floats sum, Floats a, Floats b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }

  static void PackRow(FloatType, float* to, const char* from, int64_t depth) {
    if (depth % 2 != 0) to[depth / 2] = 0;
    __builtin_memcpy(to, from, depth * 2);
  }
  static const float* PackKeys(FloatType type, float* to, const char* from, int64_t stride,
                               int64_t count, int64_t depth) {
    if (stride == depth && depth % 2 == 0) return (const float*)from;
    for (int64_t t = 0; t < count; ++t) {
      PackRow(type, to + t * PackedWords(depth), from + t * stride * 2, depth);
    }
    return to;
  }
  static const float* PackValues(FloatType, float* to, const char* from, int64_t stride,
                                 int64_t count, int64_t depth) {
    for (int64_t t = 0; t < count; t += 2) {
      const char *even = from + t * stride * 2, *odd = even + stride * 2;
      float* row = to + t / 2 * depth;
      for (int64_t i = 0; i < depth; i += kLanes) {
        const int64_t width = depth - i < kLanes ? depth - i : kLanes;
        const __m256i low = Isa::Load16Part(even + i * 2, width);
        const __m256i high =
            t + 1 < count ? Isa::Load16Part(odd + i * 2, width) : _mm256_setzero_si256();
        StorePart<kFloat32>((char*)(row + i), Pairs(low, high), width);
      }
    }
    return to;
  }
  static TVM_IPC_INLINE void StoreWeights(float* to, const Floats* weights) {
    const auto both = _mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
    Format<kFloat32>::Store((char*)to, Interleaved((__m512i)both));
  }
  /*! \brief Store the weights of 32 successive keys. */
  static TVM_IPC_INLINE void StoreWeightsOfKeys(float* to, const Floats* weights) {
    const auto all = _mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
    _mm512_storeu_si512(to, (__m512i)all);
  }

  /*! \brief Return words of one half of each of two vectors. */
  static TVM_IPC_INLINE Floats Pairs(__m256i low, __m256i high) {
    const Longs both =
        __builtin_shufflevector((Longs256)low, (Longs256)high, 0, 1, 2, 3, 4, 5, 6, 7);
    return Interleaved((__m512i)both);
  }

 private:
  typedef int64_t Longs __attribute__((vector_size(64)));
  typedef int64_t Longs256 __attribute__((vector_size(32)));

  /*! \brief Return words that have a half from each half of a vector: the lower one first. */
  static TVM_IPC_INLINE Floats Interleaved(__m512i halves) {
    alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                        21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                        11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(kOrder);
    return (Floats)_mm512_maskz_permutexvar_epi16(~__mmask32{0}, order, halves);
  }
};

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_ATTENTION_PAIRS_H_
