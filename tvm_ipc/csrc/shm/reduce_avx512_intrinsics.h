/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_avx512_intrinsics.h
 * \brief `Isa` of reduce_impl.h for AVX-512 F, BW, VL and DQ, and for BF16 where that is enabled.
 */
#ifndef TVM_IPC_SHM_REDUCE_AVX512_INTRINSICS_H_
#define TVM_IPC_SHM_REDUCE_AVX512_INTRINSICS_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace tvm_ipc {
namespace {

struct Isa {
  static constexpr size_t kBytes = 64;
  using Raw = __m512i;
  using F32 = __m512;
  using F64 = __m512d;

  static inline __mmask64 First(size_t bytes) { return (1ull << bytes) - 1; }
  static inline Raw LoadPart(const char* p, size_t bytes) {
    return _mm512_maskz_loadu_epi8(First(bytes), p);
  }
  static inline void StorePart(char* p, Raw v, size_t bytes) {
    _mm512_mask_storeu_epi8(p, First(bytes), v);
  }
  static constexpr bool kHasStream = true;
  static inline void Stream(void* p, Raw v) { _mm512_stream_si512(static_cast<Raw*>(p), v); }
  static inline void Fence() { _mm_sfence(); }
  static inline unsigned Unordered(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  static inline unsigned Unordered(F64 a, F64 b) { return _mm512_cmp_pd_mask(a, b, _CMP_UNORD_Q); }
  static inline void Halves(Raw a, Raw b, Raw* upper, Raw* lower) {
    typedef int16_t Words __attribute__((vector_size(kBytes)));
    const Words v = (Words)a, w = (Words)b;
    *upper = (Raw)__builtin_shufflevector(v, w, 1, 33, 3, 35, 5, 37, 7, 39, 9, 41, 11, 43, 13, 45,
                                          15, 47, 17, 49, 19, 51, 21, 53, 23, 55, 25, 57, 27, 59,
                                          29, 61, 31, 63);
    *lower = (Raw)__builtin_shufflevector(v, w, 0, 32, 2, 34, 4, 36, 6, 38, 8, 40, 10, 42, 12, 44,
                                          14, 46, 16, 48, 18, 50, 20, 52, 22, 54, 24, 56, 26, 58,
                                          28, 60, 30, 62);
  }
  // Masked intrinsics with full masks, because g++ 12 warns of undefined lanes in unmasked ones.
  static constexpr __mmask16 kAll = 0xffff;
  static inline void WidenHalf(const char* p, F32* low, F32* high) {
    const __m256i* half = reinterpret_cast<const __m256i*>(p);
    *low = _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(half));
    *high = _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(half + 1));
  }
  static inline Raw NarrowHalf(F32 low, F32 high) {
    __m256i first = _mm512_maskz_cvtps_ph(kAll, low, _MM_FROUND_TO_NEAREST_INT);
    __m256i second = _mm512_maskz_cvtps_ph(kAll, high, _MM_FROUND_TO_NEAREST_INT);
    return __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7);
  }
  static constexpr bool kHalvesInOrder = true;
  static constexpr bool kFused = false;
  static inline F32 MultiplyAdd(F32 a, F32 b, F32 c) { return a * b + c; }
#if defined(__AVX512BF16__)
  /*! \brief Round to nearest even. A NaN gives some NaN, and subnormals become zeros. */
  static inline Raw NarrowBFloat(F32 even, F32 odd) {
    typedef int16_t Words __attribute__((vector_size(kBytes)));
    const Words words = (Words)_mm512_cvtne2ps_pbh(odd, even);
    return (Raw)__builtin_shufflevector(words, words, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6,
                                        22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                        30, 15, 31);
  }
#endif
};

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_REDUCE_AVX512_INTRINSICS_H_
