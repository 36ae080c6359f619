/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_transpose_words.h
 * \brief Transposes words in registers; included by sources that are compiled with AVX-512.
 */
#ifndef TVM_IPC_BLAS_KERNELS_TRANSPOSE_WORDS_H_
#define TVM_IPC_BLAS_KERNELS_TRANSPOSE_WORDS_H_

#include <immintrin.h>

namespace tvm_ipc {
namespace {

/*! \brief Transpose 16 x 16 words in place. */
inline void Transpose(__m512i* rows) {
  // Masked intrinsics, because g++ 12 warns of undefined lanes in its unmasked ones.
  constexpr __mmask16 kAll = 0xffff;
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_maskz_unpacklo_epi32(kAll, rows[i], rows[i + 1]);
    t[i + 1] = _mm512_maskz_unpackhi_epi32(kAll, rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_maskz_unpacklo_epi64(0xff, t[i], t[i + 2]);
    rows[i + 1] = _mm512_maskz_unpackhi_epi64(0xff, t[i], t[i + 2]);
    rows[i + 2] = _mm512_maskz_unpacklo_epi64(0xff, t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_maskz_unpackhi_epi64(0xff, t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_maskz_shuffle_i32x4(kAll, rows[i], rows[i + 4], 0x88);
    t[i + 4] = _mm512_maskz_shuffle_i32x4(kAll, rows[i], rows[i + 4], 0xdd);
    t[i + 8] = _mm512_maskz_shuffle_i32x4(kAll, rows[i + 8], rows[i + 12], 0x88);
    t[i + 12] = _mm512_maskz_shuffle_i32x4(kAll, rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_maskz_shuffle_i32x4(kAll, t[i], t[i + 8], 0x88);
    rows[i + 4] = _mm512_maskz_shuffle_i32x4(kAll, t[i + 4], t[i + 12], 0x88);
    rows[i + 8] = _mm512_maskz_shuffle_i32x4(kAll, t[i], t[i + 8], 0xdd);
    rows[i + 12] = _mm512_maskz_shuffle_i32x4(kAll, t[i + 4], t[i + 12], 0xdd);
  }
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_TRANSPOSE_WORDS_H_
