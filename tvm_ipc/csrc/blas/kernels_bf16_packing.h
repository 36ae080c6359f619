/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_bf16_packing.h
 * \brief Packs bfloat16 operands into tiles of element pairs, the layout of instructions that add
 *        the products of two elements at once; included by sources that are compiled with AVX-512.
 *
 * A tile of a holds 16 rows of 32 elements. A tile of b holds 32 rows of 16 elements, with each
 * pair of rows interleaved into one. Both operands are packed into tiles, padded with zeros:
 *
 *      packed a: blocks of 32 rows;    each has 2 tiles per step of k
 *      packed b: panels of 32 columns; each has 2 tiles per step of k
 */
#ifndef TVM_IPC_BLAS_KERNELS_BF16_PACKING_H_
#define TVM_IPC_BLAS_KERNELS_BF16_PACKING_H_

#include <immintrin.h>

#include "blas/kernels_complementing_blas.h"
#include "blas/kernels_transpose_words.h"

namespace tvm_ipc {
namespace {

constexpr int64_t kStep = kTileStep;      // elements of k in a tile
constexpr int64_t kEdge = kTileEdge;      // rows of a block, columns of a panel
constexpr int64_t kHalf = kTileEdge / 2;  // rows of a tile of a, columns of a tile of b
constexpr int64_t kTileBytes = 1024;

__mmask32 First(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((1u << count) - 1);
}

const char* At(const TileMatrix& x, int64_t row, int64_t col) {
  return x.data + 2 * (row * x.row_stride + col * x.col_stride);
}

/*! \brief Load `lines` (up to 16) lines of `deep` (up to 32) elements that are contiguous along k.
 *         The other lines and elements are zero. */
void LoadLines(const char* from, int64_t stride, int64_t lines, int64_t deep, __m512i* to) {
  const __mmask32 mask = First(deep);
  for (int64_t i = 0; i < 16; ++i) {
    to[i] =
        i < lines ? _mm512_maskz_loadu_epi16(mask, from + 2 * i * stride) : _mm512_setzero_si512();
  }
}

/*!
 * \brief Load up to 16 pairs of rows of up to 32 columns and interleave the rows of each pair, into
 *        a left and a right half of 16 columns. Missing rows and columns are zero.
 *
 * Loads all columns at once: they are one cache line, which loads of other rows may evict.
 */
void LoadPairs(const char* from, int64_t stride, int64_t rows, int64_t cols, __m512i* left,
               __m512i* right) {
  // Indices that interleave the words of both rows: the left half, then the right half.
  alignas(64) static constexpr uint16_t kTurns[64] = {
      0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
      11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
      22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  const __m512i turns_left = _mm512_load_si512(kTurns);
  const __m512i turns_right = _mm512_load_si512(kTurns + 32);
  const __mmask32 mask = First(cols);
  for (int64_t i = 0; i < 16; ++i) {
    const char* row = from + 4 * i * stride;
    __m512i first = _mm512_setzero_si512(), second = first;
    if (2 * i < rows) first = _mm512_maskz_loadu_epi16(mask, row);
    if (2 * i + 1 < rows) second = _mm512_maskz_loadu_epi16(mask, row + 2 * stride);
    left[i] = _mm512_permutex2var_epi16(first, turns_left, second);
    right[i] = _mm512_permutex2var_epi16(first, turns_right, second);
  }
}

void Store(const __m512i* rows, char* to) {
  for (int i = 0; i < 16; ++i) _mm512_store_si512(to + 64 * i, rows[i]);
}

int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

/*! \brief Pack two tiles of b: up to 32 rows from `row` and up to 32 columns from `col`. */
void PackTilesB(const TileMatrix& b, int64_t row, int64_t rows, int64_t col, int64_t cols,
                char* to) {
  __m512i left[16], right[16];
  const char* from = At(b, row, col);
  if (b.col_stride == 1) {
    LoadPairs(from, b.row_stride, rows, cols, left, right);
  } else {
    // Pairs along k are adjacent, so each line is a column of the tile.
    LoadLines(from, b.col_stride, cols, rows, left);
    LoadLines(from + 2 * kHalf * b.col_stride, b.col_stride, cols - kHalf, rows, right);
    Transpose(left);
    Transpose(right);
  }
  Store(left, to);
  Store(right, to + kTileBytes);
}

/*! \brief Pack two tiles of a: up to 32 rows from `row` and up to 32 elements of k from `col`. */
void PackTilesA(const TileMatrix& a, int64_t row, int64_t rows, int64_t col, int64_t cols,
                char* to) {
  __m512i upper[16], lower[16];
  const char* from = At(a, row, col);
  if (a.col_stride == 1) {
    LoadLines(from, a.row_stride, rows, cols, upper);
    LoadLines(from + 2 * kHalf * a.row_stride, a.row_stride, rows - kHalf, cols, lower);
  } else {
    // These are the transposes of tiles of b.
    LoadPairs(from, a.col_stride, cols, rows, upper, lower);
    Transpose(upper);
    Transpose(lower);
  }
  Store(upper, to);
  Store(lower, to + kTileBytes);
}

void PackA(const TileMatrix& a, int64_t row, int64_t rows, int64_t k, char* to) {
  for (int64_t i = 0; i < rows; i += kEdge) {
    for (int64_t p = 0; p < k; p += kStep, to += 2 * kTileBytes) {
      PackTilesA(a, row + i, rows - i, p, Least(kStep, k - p), to);
    }
  }
}

void PackB(const TileMatrix& b, int64_t col, int64_t cols, int64_t k, char* to) {
  for (int64_t j = 0; j < cols; j += kEdge) {
    for (int64_t p = 0; p < k; p += kStep, to += 2 * kTileBytes) {
      PackTilesB(b, p, Least(kStep, k - p), col + j, cols - j, to);
    }
  }
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_BF16_PACKING_H_
