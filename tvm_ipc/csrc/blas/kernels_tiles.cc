/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_tiles.cc
 * \brief Products of bfloat16 in the tile registers of AMX; compiled with these and AVX-512
 *        enabled. Empty elsewhere.
 *
 * A tile of a holds 16 rows of 32 elements. A tile of b holds 32 rows of 16 elements, two rows
 * interleaved in one. One instruction adds their product, 16 x 16 float32, to a third tile. Both
 * operands are packed into tiles, zeros at the ends, and four tiles of sums at a time stay in
 * registers along the whole of k:
 *
 *      packed a: blocks of 32 rows,    of each the steps of k, of each 2 tiles
 *      packed b: panels of 32 columns, of each the steps of k, of each 2 tiles
 *
 * The instruction takes denormal numbers for zeros.
 */
#include "blas/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace tvm_ipc {
namespace {

constexpr int64_t kStep = kTileStep;      // elements of k in a tile
constexpr int64_t kEdge = kTileEdge;      // rows of a block, columns of a panel
constexpr int64_t kHalf = kTileEdge / 2;  // of one tile
constexpr int64_t kTileBytes = 1024;

// Masked forms with this mask: g++ 12 warns of undefined lanes in its own plain ones.
constexpr __mmask16 kAll = 0xffff;

struct __attribute__((packed)) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

__mmask32 First(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((1u << count) - 1);
}

const char* At(const TileMatrix& x, int64_t row, int64_t col) {
  return x.data + 2 * (row * x.row_stride + col * x.col_stride);
}

/*! \brief 16 x 16 words; `rows` holds what will be the columns. */
void Transpose(__m512i* rows) {
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

/*! \brief 16 lines of up to 32 elements that lie along k, lines after `lines` and elements after
 *         `deep` as zeros. */
void LoadLines(const char* from, int64_t stride, int64_t lines, int64_t deep, __m512i* to) {
  const __mmask32 mask = First(deep);
  for (int64_t i = 0; i < 16; ++i) {
    to[i] =
        i < lines ? _mm512_maskz_loadu_epi16(mask, from + 2 * i * stride) : _mm512_setzero_si512();
  }
}

/*!
 * \brief Up to 32 columns of up to 16 pairs of rows, the rows of a pair interleaved, as two times
 *        16 columns; zeros for what is not there.
 *
 * All columns at once: they are one line of the cache, and lines of other rows may drive it out.
 */
void LoadPairs(const char* from, int64_t stride, int64_t rows, int64_t cols, __m512i* left,
               __m512i* right) {
  // Words of the first row and of the second one in turns, for the left and the right half.
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

/*! \brief Two tiles of b: 32 rows from `row`, 32 columns from `col`, where there are so many. */
void PackTilesB(const TileMatrix& b, int64_t row, int64_t rows, int64_t col, int64_t cols,
                char* to) {
  __m512i left[16], right[16];
  const char* from = At(b, row, col);
  if (b.col_stride == 1) {
    LoadPairs(from, b.row_stride, rows, cols, left, right);
  } else {
    // Pairs along k lie together: each line is a column of the tile.
    LoadLines(from, b.col_stride, cols, rows, left);
    LoadLines(from + 2 * kHalf * b.col_stride, b.col_stride, cols - kHalf, rows, right);
    Transpose(left);
    Transpose(right);
  }
  Store(left, to);
  Store(right, to + kTileBytes);
}

/*! \brief Two tiles of a: 32 rows from `row`, 32 elements of k from `col`. */
void PackTilesA(const TileMatrix& a, int64_t row, int64_t rows, int64_t col, int64_t cols,
                char* to) {
  __m512i upper[16], lower[16];
  const char* from = At(a, row, col);
  if (a.col_stride == 1) {
    LoadLines(from, a.row_stride, rows, cols, upper);
    LoadLines(from + 2 * kHalf * a.row_stride, a.row_stride, rows - kHalf, cols, lower);
  } else {
    // The transposes of tiles of b.
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

/*! \brief The sums of one block of rows and one panel of columns. */
void Block(const char* a, const char* b, int64_t steps, bool two_rows, float* sums, int64_t ld) {
  _tile_zero(0);
  _tile_zero(1);
  if (two_rows) {
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t p = 0; p < steps; ++p, a += 2 * kTileBytes, b += 2 * kTileBytes) {
      _tile_loadd(4, a, 64);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + kTileBytes, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, sums + kHalf * ld, ld * 4);
    _tile_stored(3, sums + kHalf * ld + kHalf, ld * 4);
  } else {
    for (int64_t p = 0; p < steps; ++p, a += 2 * kTileBytes, b += 2 * kTileBytes) {
      _tile_loadd(4, a, 64);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, sums, ld * 4);
  _tile_stored(1, sums + kHalf, ld * 4);
}

// Not on the stack: g++ believes that the instruction reads 8 bytes of it, and may leave out the
// rest.
alignas(64) constexpr TileConfig kConfig;

void Begin() { _tile_loadconfig(&kConfig); }

void End() { _tile_release(); }

}  // namespace

constexpr TileKernels kTileKernels = {Begin, PackA, PackB, Block, End};

}  // namespace tvm_ipc
#endif  // __x86_64__
