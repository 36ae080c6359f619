/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_dot_along_k.h
 * \brief Matmuls with weights that are contiguous along k; each output is a dot product.
 *
 * These kernels read weights in place, without packing. Each weight is read from memory once for
 * all rows of x that stay in a cache. Included by sources that define `Isa` (see
 * kernel_table_of_instruction_set.h). `Terms` specifies the element types and the multiplication:
 *   kXSize, kWSize            bytes of an element of x, and of a weight
 *   Vector, kStep             type of vectors multiplied at once, and their elements of k
 *   LoadX, LoadW              load a vector
 *   LoadXPart, LoadWPart      load the first `count` elements, and zeros for the others
 *   Add                       add the products of two vectors to the sums
 */
#ifndef TVM_IPC_BLAS_KERNELS_DOT_ALONG_K_H_
#define TVM_IPC_BLAS_KERNELS_DOT_ALONG_K_H_

#include "blas/kernels_float_conversion.h"

namespace tvm_ipc {
namespace {

/*!
 * \brief Number of steps of k that are accumulated in one partial sum. The partial sums are added
 *        afterwards, because the rounding error of a sum grows with the number of its terms.
 */
constexpr int64_t kStretch = 256;

/*! \brief Rows of x and rows of weights in a tile, whose sums stay in registers. */
constexpr int kTileRows = 4, kTileCols = kLanes >= 16 ? 4 : 2;
/*! \brief Rows of weights in a tile for a single row of x: the cache lines requested at a time. */
constexpr int kOneRowCols = 8;

/*! \brief Bytes of a block of x, which stays in the L2 cache while all weights are read. */
constexpr int64_t kBytesOfX = 512 << 10;

/*! \brief Prefetch distance for weights, in bytes, if x has a single row. */
constexpr int64_t kAhead = 1024;

/*!
 * \brief x, weights and y of a block.
 *
 * The weight rows of a tile are far apart, and the next tile takes the row after each of them. So
 * weights are read as long streams, which the processor can predict, on several pages at a time.
 */
struct Dots {
  const char* x;
  int64_t x_stride;  // bytes
  const char* w;
  int64_t w_stride;  // bytes from one row of weights of a tile to its next one
  int64_t ahead;     // prefetch distance for weights, in bytes
  int64_t k;
  float* y;
  int64_t ldy;
  int64_t y_step;  // elements from one output of a tile to the next one of its row
};

template <typename Terms, int kRows, int kCols, bool kFetch>
TVM_IPC_INLINE void DotStretch(const Dots& d, int64_t begin, int64_t count, float* y, int64_t ldy,
                               int64_t step) {
  const char* x = d.x + begin * Terms::kXSize;
  const char* w = d.w + begin * Terms::kWSize;
  Floats sums[kRows][kCols] = {};
  int64_t i = 0;
  for (; i + Terms::kStep <= count; i += Terms::kStep) {
    typename Terms::Vector weights[kCols];
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) {
      const char* p = w + c * d.w_stride + i * Terms::kWSize;
      if (kFetch) __builtin_prefetch(p + d.ahead, 0, 2);
      weights[c] = Terms::LoadW(p);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const typename Terms::Vector value = Terms::LoadX(x + r * d.x_stride + i * Terms::kXSize);
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) sums[r][c] = Terms::Add(sums[r][c], value, weights[c]);
    }
  }
  if (i < count) {
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) {
      const auto weights = Terms::LoadWPart(w + c * d.w_stride + i * Terms::kWSize, count - i);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto value = Terms::LoadXPart(x + r * d.x_stride + i * Terms::kXSize, count - i);
        sums[r][c] = Terms::Add(sums[r][c], value, weights);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) y[r * ldy + c * step] = Isa::Sum(sums[r][c]);
  }
}

/*! \brief Multiply kRows rows of x by kCols rows of weights; prefetch the next ones if kFetch. */
template <typename Terms, int kRows, int kCols, bool kFetch>
void DotTile(const Dots& d) {
  constexpr int64_t kDeep = kStretch * Terms::kStep;
  const int64_t first = d.k < kDeep ? d.k : kDeep;
  DotStretch<Terms, kRows, kCols, kFetch>(d, 0, first, d.y, d.ldy, d.y_step);
  float more[kRows * kCols];
  for (int64_t i = kDeep; i < d.k; i += kDeep) {
    const int64_t count = d.k - i < kDeep ? d.k - i : kDeep;
    DotStretch<Terms, kRows, kCols, kFetch>(d, i, count, more, kCols, 1);
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kCols; ++c) d.y[r * d.ldy + c * d.y_step] += more[r * kCols + c];
    }
  }
}

/*!
 * \brief Multiply all rows of x by kCols rows of weights, which the nearest caches hold after the
 *        first tile. With kCols == 1, for the last few columns, fewer tile shapes are used, because
 *        each shape is compiled for each type and instruction set.
 */
template <typename Terms, int kCols>
void DotPanel(Dots d, int64_t rows) {
  auto next = [&](int done) {
    d.x += done * d.x_stride;
    d.y += done * d.ldy;
    rows -= done;
  };
  const bool few = rows < kTileRows;
  if (!few) {
    DotTile<Terms, kTileRows, kCols, true>(d);
    next(kTileRows);
    while (rows >= kTileRows) {
      DotTile<Terms, kTileRows, kCols, false>(d);
      next(kTileRows);
    }
  }
  if constexpr (kCols == 1) {
    while (rows > 0) {
      DotTile<Terms, 1, kCols, true>(d);
      next(1);
    }
  } else if (few) {
    if (rows == 3) DotTile<Terms, 3, kCols, true>(d);
    if (rows == 2) DotTile<Terms, 2, kCols, true>(d);
    if (rows == 1) DotTile<Terms, 1, kCols, true>(d);
  } else {
    if (rows == 3) DotTile<Terms, 3, kCols, false>(d);
    if (rows == 2) DotTile<Terms, 2, kCols, false>(d);
    if (rows == 1) DotTile<Terms, 1, kCols, false>(d);
  }
}

template <typename Terms, int kCols>
void DotColumns(Dots d, int64_t rows, int64_t count, int64_t stride) {
  static_assert(kOneRowCols != kTileCols, "of one row alone");
  for (int64_t j = 0; j < count; ++j) {
    if constexpr (kCols == kOneRowCols) {
      DotTile<Terms, 1, kCols, true>(d);
    } else {
      DotPanel<Terms, kCols>(d, rows);
    }
    d.w += stride;
    ++d.y;
  }
}

/*! \brief Compute y[r][n] = sum over k of x[r][k] * weights[n][k]. */
template <typename Terms>
void Dot(const char* x, int64_t ldx, int64_t rows, Weights weights, int64_t k, int64_t n, float* y,
         int64_t ldy) {
  const int64_t stride = weights.ld * Terms::kWSize;
  const int64_t cols = rows == 1 ? kOneRowCols : kTileCols, count = n / cols;
  int64_t block = kBytesOfX / (k * Terms::kXSize + 1) / kTileRows * kTileRows;
  if (block < kTileRows) block = kTileRows;
  for (int64_t i = 0; i < rows; i += block) {
    const int64_t height = rows - i < block ? rows - i : block;
    Dots d{x + i * ldx * Terms::kXSize,
           ldx * Terms::kXSize,
           weights.data,
           count * stride,
           rows == 1 ? kAhead : stride,
           k,
           y + i * ldy,
           ldy,
           count};
    if (rows == 1) {
      DotColumns<Terms, kOneRowCols>(d, 1, count, stride);
    } else {
      DotColumns<Terms, kTileCols>(d, height, count, stride);
    }
    d.w += cols * count * stride;
    d.y += cols * count;
    DotColumns<Terms, 1>(d, height, n - cols * count, stride);
  }
}

/*! \brief `Terms` of weights of any type, widened to float32, and float32 x. */
template <FloatType type>
struct Widened {
  static constexpr int64_t kXSize = 4, kWSize = Format<type>::kSize, kStep = kLanes;
  using Vector = Floats;
  static TVM_IPC_INLINE Floats LoadX(const char* p) { return Format<kFloat32>::Load(p); }
  static TVM_IPC_INLINE Floats LoadW(const char* p) { return Format<type>::Load(p); }
  static TVM_IPC_INLINE Floats LoadXPart(const char* p, int64_t count) {
    return LoadPart<kFloat32>(p, count);
  }
  static TVM_IPC_INLINE Floats LoadWPart(const char* p, int64_t count) {
    return LoadPart<type>(p, count);
  }
  static TVM_IPC_INLINE Floats Add(Floats sums, Floats x, Floats w) { return sums + x * w; }
};

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_DOT_ALONG_K_H_
