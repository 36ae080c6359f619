/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file blas_avx2.cc
 * \brief The kernels beside a BLAS for AVX2, FMA and F16C; compiled with these enabled. Empty
 *        elsewhere.
 */
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace tvm_ipc {
namespace {

struct Isa {
  static constexpr size_t kBytes = 32;
  static constexpr int64_t kLanes = 8;
  typedef uint32_t U32 __attribute__((vector_size(32)));

  static inline __m128i Load(const char* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  static inline __m256 WidenHalf(const char* p) { return _mm256_cvtph_ps(Load(p)); }
  static inline void NarrowHalf(char* p, __m256 v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static inline __m256 WidenBrain(const char* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(Load(p)), 16));
  }
  static inline void NarrowBrain(char* p, U32 words) {
    __m256i v = (__m256i)words;
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }
  static inline float Sum(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
};

}  // namespace
}  // namespace tvm_ipc

#include "blas_impl.h"

namespace tvm_ipc {
constexpr BlasKernels kAvx2Blas = MakeBlasKernels("avx2");
}  // namespace tvm_ipc
#endif  // __x86_64__
