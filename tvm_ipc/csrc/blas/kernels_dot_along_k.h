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
 *   kPanelRows                rows of x that panels of weights are multiplied by at once, of more
 *                             rows than kTileRows; 0 if these are computed in tiles, too
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
constexpr int kOneRowCols = kLanes >= 16 ? 8 : 4;

/*! \brief Bytes of a block of x, which stays in the L2 cache while all weights are read. */
constexpr int64_t kBytesOfX = 512 << 10;

/*!
 * \brief Prefetch distance for weights, in bytes, if x has at most kRowsWithAhead rows; of more
 *        rows, the next row of weights is prefetched. On Zen 3, a row takes 1.1 to 1.3 times as
 *        long with the distance and kOneRowCols of AVX-512.
 */
constexpr int64_t kAhead = kLanes >= 16 ? 1024 : 384;
constexpr int64_t kRowsWithAhead = kLanes >= 16 ? 1 : kTileRows;

/*!
 * \brief Rows of weights in a panel. With eight rows of x, all vector registers have sums, but for
 *        those of the operands, so that a load of x has three multiplications.
 */
constexpr int kPanelCols = 3;
/*!
 * \brief Panels of a block, by which all groups of rows of x are multiplied in turn: the L1 cache
 *        holds a group meanwhile, and the L2 cache this block and the next one. If there is only
 *        one group, a block is the distance of prefetching.
 */
constexpr int64_t kPanelBlock = 16, kPanelBlockOfOneGroup = 2;

/*! \brief Prefetch distance from the L2 cache to the L1 cache, in bytes of each row of a panel. */
constexpr int64_t kAheadInPanel = 256;

/*!
 * \brief x, weights and y of a block.
 *
 * The weight rows of a tile are far apart, and the next tile takes the row after each of them. So
 * weights are read as long streams, which the processor can predict, on several pages at a time.
 * Those of a panel follow each other, and panels are prefetched in the order of memory: with that
 * many multiplications for each weight, no other order has time to read them.
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

/*! \brief What to prefetch: nothing, the weights `Dots::ahead` of the current ones, or the panel
 *         that begins `Dots::ahead` of the current one. */
enum DotFetch { kFetchNothing, kFetchRows, kFetchPanel };

template <typename Terms, int kRows, int kCols, DotFetch kFetch>
TVM_IPC_INLINE void DotStretch(const Dots& d, int64_t begin, int64_t count, float* y, int64_t ldy,
                               int64_t step) {
  const char* x = d.x + begin * Terms::kXSize;
  const char* w = d.w + begin * Terms::kWSize;
  const char* panel = d.w + d.ahead + begin * Terms::kWSize * kCols;
  Floats sums[kRows][kCols] = {};
  int64_t i = 0;
  for (; i + Terms::kStep <= count; i += Terms::kStep) {
    typename Terms::Vector weights[kCols];
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) {
      const char* p = w + c * d.w_stride + i * Terms::kWSize;
      if (kFetch == kFetchRows) __builtin_prefetch(p + d.ahead, 0, 2);
      if (kFetch == kFetchPanel) {
        __builtin_prefetch(panel + (i * kCols + c * Terms::kStep) * Terms::kWSize, 0, 2);
        __builtin_prefetch(p + kAheadInPanel, 0, 3);
      }
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
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) y[r * ldy + c * step] = Isa::Sum(sums[r][c]);
  }
}

/*! \brief Multiply kRows rows of x by kCols rows of weights. */
template <typename Terms, int kRows, int kCols, DotFetch kFetch>
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
    DotTile<Terms, kTileRows, kCols, kFetchRows>(d);
    next(kTileRows);
    while (rows >= kTileRows) {
      DotTile<Terms, kTileRows, kCols, kFetchNothing>(d);
      next(kTileRows);
    }
  }
  if constexpr (kCols == 1) {
    while (rows > 0) {
      DotTile<Terms, 1, kCols, kFetchRows>(d);
      next(1);
    }
  } else if (few) {
    if (rows == 3) DotTile<Terms, 3, kCols, kFetchRows>(d);
    if (rows == 2) DotTile<Terms, 2, kCols, kFetchRows>(d);
    if (rows == 1) DotTile<Terms, 1, kCols, kFetchRows>(d);
  } else {
    if (rows == 3) DotTile<Terms, 3, kCols, kFetchNothing>(d);
    if (rows == 2) DotTile<Terms, 2, kCols, kFetchNothing>(d);
    if (rows == 1) DotTile<Terms, 1, kCols, kFetchNothing>(d);
  }
}

template <typename Terms, int kCols>
void DotColumns(Dots d, int64_t rows, int64_t count, int64_t stride) {
  static_assert(kOneRowCols != kTileCols, "of one row alone");
  for (int64_t j = 0; j < count; ++j) {
    if constexpr (kCols == kOneRowCols) {
      DotTile<Terms, 1, kCols, kFetchRows>(d);
    } else {
      DotPanel<Terms, kCols>(d, rows);
    }
    d.w += stride;
    ++d.y;
  }
}

/*! \brief Multiply 4 to 8 rows of x by one panel. */
template <typename Terms, DotFetch kFetch>
void DotGroup(const Dots& d, int64_t rows) {
  static_assert(Terms::kPanelRows == 8, "of which there are cases");
  if (rows == 8) return DotTile<Terms, 8, kPanelCols, kFetch>(d);
  if (rows == 7) return DotTile<Terms, 7, kPanelCols, kFetch>(d);
  if (rows == 6) return DotTile<Terms, 6, kPanelCols, kFetch>(d);
  if (rows == 5) return DotTile<Terms, 5, kPanelCols, kFetch>(d);
  DotTile<Terms, 4, kPanelCols, kFetch>(d);
}

/*!
 * \brief Multiply more than kTileRows rows by the columns that are in whole panels, and return the
 *        number of columns. Groups of rows differ by one row at most. The panels of the next block
 *        are prefetched at equal intervals.
 */
template <typename Terms>
int64_t DotPanels(Dots d, int64_t rows, int64_t n) {
  const int64_t panel = kPanelCols * d.w_stride, count = n / kPanelCols;
  const int64_t groups = (rows + Terms::kPanelRows - 1) / Terms::kPanelRows;
  const int64_t block = groups == 1 ? kPanelBlockOfOneGroup : kPanelBlock;
  for (int64_t first = 0; first < count; first += block) {
    const int64_t size = first + block < count ? block : count - first;
    const char* next = d.w + (first + block) * panel;
    int64_t wait = 0;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t from = rows * group / groups, height = rows * (group + 1) / groups - from;
      Dots own = d;
      own.x += from * d.x_stride;
      for (int64_t j = first; j < first + size; ++j) {
        own.w = d.w + j * panel;
        own.y = d.y + from * d.ldy + j * kPanelCols;
        if (wait == 0) {
          own.ahead = next - own.w;
          DotGroup<Terms, kFetchPanel>(own, height);
          next += panel;
          wait = groups;
        } else {
          DotGroup<Terms, kFetchNothing>(own, height);
        }
        --wait;
      }
    }
  }
  return count * kPanelCols;
}

/*! \brief Compute y[r][n] = sum over k of x[r][k] * weights[n][k]. */
template <typename Terms>
void Dot(const char* x, int64_t ldx, int64_t rows, Weights weights, int64_t k, int64_t n, float* y,
         int64_t ldy) {
  const int64_t stride = weights.ld * Terms::kWSize;
  const int64_t cols = rows == 1 ? kOneRowCols : kTileCols, count = n / cols;
  const bool panels = Terms::kPanelRows != 0 && rows > kTileRows;
  const int64_t least = panels ? Terms::kPanelRows : kTileRows;
  int64_t block = kBytesOfX / (k * Terms::kXSize + 1) / kTileRows * kTileRows;
  if (block < least) block = least;
  // If there are several blocks, DotPanels has to be called for half of kPanelRows at least.
  const int64_t blocks = (rows + block - 1) / block;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t i = panels ? rows * b / blocks : b * block;
    const int64_t end = panels ? rows * (b + 1) / blocks : i + block;
    const int64_t height = (end < rows ? end : rows) - i;
    Dots d{x + i * ldx * Terms::kXSize,
           ldx * Terms::kXSize,
           weights.data,
           count * stride,
           rows <= kRowsWithAhead ? kAhead : stride,
           k,
           y + i * ldy,
           ldy,
           count};
    int64_t done = cols * count;
    if (panels) {
      if constexpr (Terms::kPanelRows != 0) {
        d.w_stride = stride;
        d.y_step = 1;
        done = DotPanels<Terms>(d, height, n);
      }
    } else if (rows == 1) {
      DotColumns<Terms, kOneRowCols>(d, 1, count, stride);
    } else {
      DotColumns<Terms, kTileCols>(d, height, count, stride);
    }
    d.w += done * stride;
    d.y += done;
    DotColumns<Terms, 1>(d, height, n - done, stride);
  }
}

/*! \brief `Terms` of weights of any type, widened to float32, and float32 x. */
template <FloatType type>
struct Widened {
  static constexpr int64_t kXSize = 4, kWSize = Format<type>::kSize, kStep = kLanes;
  static constexpr int64_t kPanelRows = 0;
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
