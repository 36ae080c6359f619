/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file isa_avx512.h
 * \brief `Isa` of kernel_table_of_instruction_set.h for AVX-512; included by sources that are
 * compiled with it.
 */
#ifndef TVM_IPC_BLAS_ISA_AVX512_H_
#define TVM_IPC_BLAS_ISA_AVX512_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace tvm_ipc {
namespace {

// Masked intrinsics with full masks, because g++ 12 warns of undefined lanes in its unmasked ones.
struct Isa {
  static constexpr size_t kBytes = 64;
  static constexpr int64_t kLanes = 16;
  static constexpr __mmask16 kAll = 0xffff;
  typedef uint32_t U32 __attribute__((vector_size(64)));

  using Raw16 = __m256i;

  static inline __mmask16 First(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static inline __m256i Load16(const char* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static inline __m256i Load16Part(const char* p, int64_t count) {
    return _mm256_maskz_loadu_epi16(First(count), p);
  }
  static inline void Store16(char* p, __m256i v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
  }
  static inline void Store16Part(char* p, __m256i v, int64_t count) {
    _mm256_mask_storeu_epi16(p, First(count), v);
  }
  static inline __m512 Load32Part(const char* p, int64_t count) {
    return _mm512_maskz_loadu_ps(First(count), p);
  }
  static inline void Store32Part(char* p, __m512 v, int64_t count) {
    _mm512_mask_storeu_ps(p, First(count), v);
  }
  static inline __m512 WidenHalf(__m256i raw) { return _mm512_maskz_cvtph_ps(kAll, raw); }
  static inline __m256i NarrowHalf(__m512 v) {
    return _mm512_maskz_cvtps_ph(kAll, v, _MM_FROUND_TO_NEAREST_INT);
  }
  static inline __m512 WidenBrain(__m256i raw) {
    return (__m512)((U32)_mm512_maskz_cvtepu16_epi32(kAll, raw) << 16);
  }
  static inline __m256i Lower(U32 words) {
    return _mm512_maskz_cvtepi32_epi16(kAll, (__m512i)words);
  }
  template <typename Vector>
  static inline void Transpose(Vector* rows) {
    __m512 t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_maskz_unpacklo_ps(kAll, (__m512)rows[i], (__m512)rows[i + 1]);
      t[i + 1] = _mm512_maskz_unpackhi_ps(kAll, (__m512)rows[i], (__m512)rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      u[i] = _mm512_maskz_shuffle_ps(kAll, t[i], t[i + 2], 0x44);
      u[i + 1] = _mm512_maskz_shuffle_ps(kAll, t[i], t[i + 2], 0xee);
      u[i + 2] = _mm512_maskz_shuffle_ps(kAll, t[i + 1], t[i + 3], 0x44);
      u[i + 3] = _mm512_maskz_shuffle_ps(kAll, t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_maskz_shuffle_f32x4(kAll, u[i], u[i + 4], 0x88);
      t[i + 4] = _mm512_maskz_shuffle_f32x4(kAll, u[i], u[i + 4], 0xdd);
      t[i + 8] = _mm512_maskz_shuffle_f32x4(kAll, u[i + 8], u[i + 12], 0x88);
      t[i + 12] = _mm512_maskz_shuffle_f32x4(kAll, u[i + 8], u[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
      rows[i] = (Vector)_mm512_maskz_shuffle_f32x4(kAll, t[i], t[i + 8], 0x88);
      rows[i + 4] = (Vector)_mm512_maskz_shuffle_f32x4(kAll, t[i + 4], t[i + 12], 0x88);
      rows[i + 8] = (Vector)_mm512_maskz_shuffle_f32x4(kAll, t[i], t[i + 8], 0xdd);
      rows[i + 12] = (Vector)_mm512_maskz_shuffle_f32x4(kAll, t[i + 4], t[i + 12], 0xdd);
    }
  }
  template <typename Vector>
  static inline void LoadTransposed(Vector* rows, const char* from, int64_t stride) {
    for (int64_t i = 0; i < kLanes; ++i) {
      __builtin_memcpy(rows + i, from + i * stride, sizeof(Vector));
    }
    Transpose(rows);
  }
  template <typename Vector>
  static inline Vector Fma(Vector a, Vector b, Vector sum) {
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
  }
  static inline float Sum(__m512 v) {
    typedef float F32 __attribute__((vector_size(64)));
    F32 all = (F32)v;
    __m256 half =
        _mm256_add_ps((__m256)__builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7),
                      (__m256)__builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
  }
};

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_ISA_AVX512_H_
