/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file isa_avx2.h
 * \brief `Isa` of kernel_table_of_instruction_set.h for AVX2, FMA and F16C; included by sources
 * that are compiled with these.
 */
#ifndef TVM_IPC_BLAS_ISA_AVX2_H_
#define TVM_IPC_BLAS_ISA_AVX2_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace tvm_ipc {
namespace {

struct Isa {
  static constexpr size_t kBytes = 32;
  static constexpr int64_t kLanes = 8;
  typedef uint32_t U32 __attribute__((vector_size(32)));

  using Raw16 = __m128i;

  static inline __m128i Load16(const char* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  static inline __m128i Load16Part(const char* p, int64_t count) {
    __m128i v = _mm_setzero_si128();
    __builtin_memcpy(&v, p, count * 2);
    return v;
  }
  static inline void Store16(char* p, __m128i v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v);
  }
  static inline void Store16Part(char* p, __m128i v, int64_t count) {
    __builtin_memcpy(p, &v, count * 2);
  }
  static inline __m256i First(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static inline __m256 Load32Part(const char* p, int64_t count) {
    return _mm256_maskload_ps(reinterpret_cast<const float*>(p), First(count));
  }
  static inline void Store32Part(char* p, __m256 v, int64_t count) {
    _mm256_maskstore_ps(reinterpret_cast<float*>(p), First(count), v);
  }
  static inline __m256 WidenHalf(__m128i raw) { return _mm256_cvtph_ps(raw); }
  static inline __m128i NarrowHalf(__m256 v) {
    return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
  }
  static inline __m256 WidenBrain(__m128i raw) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
  }
  static inline __m128i Lower(U32 words) {
    __m256i v = (__m256i)words;
    return _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  }
  template <typename Vector>
  static inline void Transpose(Vector* rows) {
    for (int i = 0; i < 4; ++i) {
      const __m256 low = (__m256)rows[i], high = (__m256)rows[i + 4];
      rows[i] = (Vector)_mm256_permute2f128_ps(low, high, 0x20);
      rows[i + 4] = (Vector)_mm256_permute2f128_ps(low, high, 0x31);
    }
    TransposeHalves(rows);
  }
  template <typename Vector>
  static inline void LoadTransposed(Vector* rows, const char* from, int64_t stride) {
    // Loading halves takes no shuffles.
    for (int i = 0; i < 4; ++i) {
      const char *low = from + i * stride, *high = low + 4 * stride;
      for (int half = 0; half < 2; ++half) {
        rows[i + 4 * half] = (Vector)_mm256_insertf128_ps(
            _mm256_castps128_ps256(_mm_loadu_ps(reinterpret_cast<const float*>(low) + 4 * half)),
            _mm_loadu_ps(reinterpret_cast<const float*>(high) + 4 * half), 1);
      }
    }
    TransposeHalves(rows);
  }
  /*! \brief Transpose the 4 x 4 floats in each half of the first and of the last four rows. */
  template <typename Vector>
  static inline void TransposeHalves(Vector* rows) {
    for (int i = 0; i < 8; i += 4) {
      const __m256 a = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
      const __m256 b = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
      const __m256 c = _mm256_unpacklo_ps((__m256)rows[i + 2], (__m256)rows[i + 3]);
      const __m256 d = _mm256_unpackhi_ps((__m256)rows[i + 2], (__m256)rows[i + 3]);
      rows[i] = (Vector)_mm256_shuffle_ps(a, c, 0x44);
      rows[i + 1] = (Vector)_mm256_shuffle_ps(a, c, 0xee);
      rows[i + 2] = (Vector)_mm256_shuffle_ps(b, d, 0x44);
      rows[i + 3] = (Vector)_mm256_shuffle_ps(b, d, 0xee);
    }
  }
  template <typename Vector>
  static inline Vector Fma(Vector a, Vector b, Vector sum) {
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
  }
  static inline float Sum(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
};

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_ISA_AVX2_H_
