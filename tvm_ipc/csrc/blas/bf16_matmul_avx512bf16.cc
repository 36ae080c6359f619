/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file bf16_matmul_avx512bf16.cc
 * \brief bfloat16 matmuls with vector instructions, for processors without tile registers; compiled
 *        with AVX-512 and its bfloat16 extension enabled. Empty on other architectures.
 *
 * One instruction multiplies 16 pairs of b, one for each of 16 columns, by one pair of a, and adds
 * both products to the sum of each column. It treats denormal numbers as zeros, as AMX does.
 */
#include "blas/kernels_complementing_blas.h"

#if defined(__x86_64__)
#include "blas/isa_avx512.h"
#include "blas/kernels_bf16_packing.h"
#include "blas/kernels_dot_along_k.h"

namespace tvm_ipc {
namespace {

constexpr int64_t kStepBytes = 2 * kTileBytes;
constexpr int64_t kLine = 64;  // bytes of one row of a, or of one pair of rows of b, in a tile

/*! \brief Return the byte offset of a row of a block of a in the tiles of one step. */
constexpr int64_t RowAt(int64_t row) { return row / kHalf * kTileBytes + row % kHalf * kLine; }

/*! \brief Compute the sums of kRows rows of a block and one panel of columns; all sums stay in
 *         registers. */
template <int kFirst, int kRows>
void Rows(const char* a, const char* b, int64_t steps, float* sums, int64_t ld) {
  __m512 left[kRows], right[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) left[r] = right[r] = _mm512_setzero_ps();
  for (int64_t p = 0; p < steps; ++p, a += kStepBytes, b += kStepBytes) {
    for (int64_t pair = 0; pair < kStep / 2; ++pair) {
      const __m512bh of_left = (__m512bh)_mm512_load_si512(b + pair * kLine);
      const __m512bh of_right = (__m512bh)_mm512_load_si512(b + kTileBytes + pair * kLine);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        int word;
        __builtin_memcpy(&word, a + RowAt(kFirst + r) + 4 * pair, 4);
        const __m512bh of_a = (__m512bh)_mm512_set1_epi32(word);
        left[r] = _mm512_dpbf16_ps(left[r], of_a, of_left);
        right[r] = _mm512_dpbf16_ps(right[r], of_a, of_right);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    _mm512_storeu_ps(sums + (kFirst + r) * ld, left[r]);
    _mm512_storeu_ps(sums + (kFirst + r) * ld + kHalf, right[r]);
  }
}

void Block(const char* a, const char* b, int64_t steps, bool two_rows, float* sums, int64_t ld) {
  if (two_rows) {
    Rows<0, 11>(a, b, steps, sums, ld);
    Rows<11, 11>(a, b, steps, sums, ld);
    Rows<22, 10>(a, b, steps, sums, ld);
  } else {
    Rows<0, 8>(a, b, steps, sums, ld);
    Rows<8, 8>(a, b, steps, sums, ld);
  }
}

void Nothing() {}

/*! \brief `Terms` of kernels_dot_along_k.h that multiplies pairs of adjacent elements of x and
 * weights. */
struct InPlace {
  static constexpr int64_t kXSize = 2, kWSize = 2, kStep = kTileStep;
  static constexpr int64_t kPanelRows = 8;
  using Vector = __m512bh;
  static TVM_IPC_INLINE __m512bh LoadX(const char* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static TVM_IPC_INLINE __m512bh LoadW(const char* p) { return LoadX(p); }
  static TVM_IPC_INLINE __m512bh LoadXPart(const char* p, int64_t count) {
    return (__m512bh)_mm512_maskz_loadu_epi16(tvm_ipc::First(count), p);
  }
  static TVM_IPC_INLINE __m512bh LoadWPart(const char* p, int64_t count) {
    return LoadXPart(p, count);
  }
  static TVM_IPC_INLINE Floats Add(Floats sums, __m512bh x, __m512bh w) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, x, w);
  }
};

}  // namespace

constexpr TileKernels kPairKernels = {"avx512bf16", 256, Nothing, PackA, PackB, Block, Nothing};
constexpr DotFn kPairDot = Dot<InPlace>;

}  // namespace tvm_ipc
#endif  // __x86_64__
