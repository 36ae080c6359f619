/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file fixed_order_matmul_avx2.cc
 * \brief Matmuls whose sums have the order of Parts, for all instruction sets from AVX2 on;
 * compiled with AVX2, FMA and F16C. Empty on other architectures.
 *
 * Both operands are contiguous along k. Each output of a tile has a vector of sums along k, one for
 * each lane of a part. At the end of a part, the lanes of several outputs are added at once, and
 * the result is added to the tree. Sums that wait for others are kept as the digits of a binary
 * counter: level l is free or has the sum of 2^l parts. Part i finds as many levels as i ends with
 * digits 1; these are added to its sum, and the result is the next level.
 */
#if defined(__x86_64__)
#include "blas/isa_avx2.h"
#include "blas/kernels_axpy_along_n.h"

namespace tvm_ipc {
namespace {

static_assert(kLanes == kFixedOrderLanes, "a vector has the lanes of a part");

/*! \brief Rows and columns of a tile, whose sums and operands fill the registers, and columns of a
 *         tile of one row: the cache lines requested at a time. */
constexpr int kFixedTileRows = 3, kFixedTileCols = 4, kFixedOneRowCols = 8;
/*! \brief The most levels: k has at most 2^48 steps. */
constexpr int kFixedLevels = 48;
/*! \brief Bytes of rows of x that stay in the L1 cache while the weights of a block are read. */
constexpr int64_t kFixedBytesOfX = 16 << 10;
/*! \brief Prefetch distance for weights, in bytes, if x has few rows. */
constexpr int64_t kFixedAhead = 512;
/*! \brief The floats of a tile in `levels`. */
constexpr int64_t kFixedTileFloats = 2 * kLanes;

template <int kRows, int kCols>
struct FixedTile {
  static constexpr int kQuads = kRows * kCols / 4;
  static constexpr int kVectors = (kQuads + 1) / 2;

  const float* x[kRows];
  const char* w[kCols];
  Floats sums[kVectors];

  /*! \brief Return the vector and the lane of an output. */
  static constexpr int VectorOf(int r, int c) { return (r * kCols + c) / 4 / 2; }
  static constexpr int LaneOf(int r, int c) {
    return c % 4 / 2 * 4 + (r * kCols + c) / 4 % 2 * 2 + c % 2;
  }

  /*! \brief Compute the sums of all parts. */
  template <FloatType type, bool kFetch>
  TVM_IPC_INLINE void Add(const Parts& parts) {
    Floats levels[kFixedLevels][kVectors];
    for (int64_t part = 0;; ++part) {
      AddPart<type, kFetch>(part * parts.size, (part + 1) * parts.size);
      int level = 0;
      for (; part >> level & 1; ++level) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sums[v] += levels[level][v];
      }
      if (part + 1 == parts.count) return;
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) levels[level][v] = sums[v];
    }
  }

 private:
  template <FloatType type, bool kFetch>
  TVM_IPC_INLINE void AddPart(int64_t begin, int64_t end) {
    constexpr int64_t kSize = Format<type>::kSize;
    Floats lanes[kRows][kCols] = {};
    int64_t p = begin;
    for (; p + kLanes <= end; p += kLanes) AddVectors<type, kFetch>(p, lanes);
    if (p < end) {
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) {
        const Floats weights = LoadPart<type>(w[c] + p * kSize, end - p);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const Floats of_x = LoadPart<kFloat32>((const char*)(x[r] + p), end - p);
          lanes[r][c] = Isa::Fma(of_x, weights, lanes[r][c]);
        }
      }
    }
    const Floats* all = lanes[0];
    Floats quads[kQuads];
#pragma GCC unroll 4
    for (int q = 0; q < kQuads; ++q) quads[q] = SumQuarters(all + 4 * q);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sums[v] = SumPairs(quads[2 * v], quads[2 * v + 1 < kQuads ? 2 * v + 1 : 2 * v]);
    }
  }

  /*! \brief Add the products of the steps [p, p + kLanes). */
  template <FloatType type, bool kFetch>
  TVM_IPC_INLINE void AddVectors(int64_t p, Floats (*lanes)[kCols]) const {
    Floats of_x[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) of_x[r] = Format<kFloat32>::Load((const char*)(x[r] + p));
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) {
      const char* at = w[c] + p * Format<type>::kSize;
      if (kFetch) __builtin_prefetch(at + kFixedAhead, 0, 2);
      const Floats weights = Format<type>::Load(at);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) lanes[r][c] = Isa::Fma(of_x[r], weights, lanes[r][c]);
    }
  }

  /*! \brief Return the sums of the even lanes, and of the odd ones, of four vectors. */
  static TVM_IPC_INLINE Floats SumQuarters(const Floats* of) {
    auto halves = [](Floats left, Floats right) {
      const __m256 a = (__m256)left, b = (__m256)right;
      return _mm256_add_ps(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21));
    };
    const __m256 a = halves(of[0], of[2]), b = halves(of[1], of[3]);
    return (Floats)_mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  }
  static TVM_IPC_INLINE Floats SumPairs(Floats left, Floats right) {
    const __m256 a = (__m256)left, b = (__m256)right;
    return (Floats)_mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
  }
};

/*! \brief A matmul of few rows. Columns of a tile are `far` columns apart, so that weights are read
 *         as long streams, which the processor can predict. */
struct FewFixedRows {
  const float* x;
  int64_t ldx, rows;
  const char* w;
  int64_t stride;  // bytes
  Parts parts;
  float* y;
  int64_t ldy;

  template <FloatType type, int kRows, int kCols>
  void Tile(int64_t row, int64_t column, int64_t far, int64_t cols) const {
    FixedTile<kRows, kCols> tile;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) tile.x[r] = x + (row + r) * ldx;
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) {
      tile.w[c] = w + (column + (c < cols ? c : cols - 1) * far) * stride;
    }
    tile.template Add<type, true>(parts);
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) {
      if (c >= cols) break;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        y[(row + r) * ldy + column + c * far] = tile.sums[tile.VectorOf(r, c)][tile.LaneOf(r, c)];
      }
    }
  }

  template <FloatType type, int kCols>
  void Columns(int64_t column, int64_t far, int64_t cols) const {
    if constexpr (kCols == kFixedOneRowCols) {
      Tile<type, 1, kCols>(0, column, far, cols);
    } else {
      // The rows of tiles differ by one at most.
      const int64_t tiles = (rows + kFixedTileRows - 1) / kFixedTileRows;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t row = rows * tile / tiles, height = rows * (tile + 1) / tiles - row;
        if (height == 3) Tile<type, 3, kCols>(row, column, far, cols);
        if (height == 2) Tile<type, 2, kCols>(row, column, far, cols);
        if (height == 1) Tile<type, 1, kCols>(row, column, far, cols);
      }
    }
  }

  template <FloatType type, int kCols>
  void Run(int64_t n) const {
    const int64_t count = n / kCols;
    for (int64_t j = 0; j < count; ++j) Columns<type, kCols>(j, count, kCols);
    if (count * kCols < n) Columns<type, kCols>(count * kCols, 1, n - count * kCols);
  }
};

template <FloatType type>
void FewRowsInFixedOrder(const float* x, int64_t ldx, int64_t rows, Weights weights,
                         const Parts& parts, int64_t n, float* y, int64_t ldy) {
  const FewFixedRows all{x,     ldx, rows, weights.data, weights.ld * Format<type>::kSize,
                         parts, y,   ldy};
  if (rows == 1) return all.Run<type, kFixedOneRowCols>(n);
  all.Run<type, kFixedTileCols>(n);
}

int64_t FixedTilesOf(int64_t cols) { return (cols + kFixedTileCols - 1) / kFixedTileCols; }

int64_t FixedLevelSize(int64_t rows, int64_t cols) {
  return (rows + kFixedTileRows - 1) / kFixedTileRows * FixedTilesOf(cols) * kFixedTileFloats;
}

void FixedOrderTiles(const FixedOrderBlock& block, float* levels, float* y, int64_t ldy) {
  using Tile = FixedTile<kFixedTileRows, kFixedTileCols>;
  const int64_t depth = block.parts.count * block.parts.size;
  const int64_t level_size = FixedLevelSize(block.rows, block.cols);
  const int64_t row_size = FixedTilesOf(block.cols) * kFixedTileFloats;
  const int full = __builtin_ctzll(block.index + 1);
  const bool last = block.index + 1 == block.count;
  int64_t height = kFixedBytesOfX / 4 / depth / kFixedTileRows * kFixedTileRows;
  if (height < kFixedTileRows) height = kFixedTileRows;
  // Prefetch as many cache lines with each tile.
  const int64_t tiles = level_size / kFixedTileFloats;
  const int64_t lines = block.next_lines * ((block.next_bytes + 63) / 64);
  const int64_t lines_of_tile = (lines + tiles - 1) / tiles;
  int64_t next_line = 0, next_byte = 0;
  auto prefetch = [&]() {
    for (int64_t q = 0; q < lines_of_tile && next_line < block.next_lines; ++q) {
      __builtin_prefetch(block.next + next_line * block.next_stride + next_byte, 0, 2);
      next_byte += 64;
      if (next_byte >= block.next_bytes) {
        next_byte = 0;
        ++next_line;
      }
    }
  };
  for (int64_t first = 0; first < block.rows; first += height) {
    const int64_t end = first + height < block.rows ? first + height : block.rows;
    for (int64_t j = 0; j < block.cols; j += kFixedTileCols) {
      const int64_t cols = block.cols - j < kFixedTileCols ? block.cols - j : kFixedTileCols;
      for (int64_t i = first; i < end; i += kFixedTileRows) {
        const int64_t rows = end - i < kFixedTileRows ? end - i : kFixedTileRows;
        prefetch();
        // The last rows and columns take the place of those after them.
        Tile tile;
#pragma GCC unroll 4
        for (int r = 0; r < kFixedTileRows; ++r) {
          tile.x[r] = block.x + (i + (r < rows ? r : rows - 1)) * block.ldx;
        }
#pragma GCC unroll 4
        for (int c = 0; c < kFixedTileCols; ++c) {
          tile.w[c] = (const char*)(block.weights + (j + (c < cols ? c : cols - 1)) * block.ldw);
        }
        tile.Add<kFloat32, false>(block.parts);
        float* waiting =
            levels + i / kFixedTileRows * row_size + j / kFixedTileCols * kFixedTileFloats;
        for (int level = 0; level < full; ++level, waiting += level_size) {
          tile.sums[0] += Format<kFloat32>::Load((const char*)waiting);
          tile.sums[1] += Format<kFloat32>::Load((const char*)(waiting + kLanes));
        }
        if (!last) {
          Format<kFloat32>::Store((char*)waiting, tile.sums[0]);
          Format<kFloat32>::Store((char*)(waiting + kLanes), tile.sums[1]);
          continue;
        }
        alignas(Isa::kBytes) float outputs[2 * kLanes];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const __m256d pairs = (__m256d)tile.sums[v];
          _mm256_store_pd((double*)(outputs + v * kLanes), _mm256_permute4x64_pd(pairs, 0xd8));
        }
        for (int64_t r = 0; r < rows; ++r) {
          float* to = y + (i + r) * ldy + j;
          if (cols == kFixedTileCols) {
            __builtin_memcpy(to, outputs + r * kFixedTileCols, 4 * kFixedTileCols);
          } else {
            for (int64_t c = 0; c < cols; ++c) to[c] = outputs[r * kFixedTileCols + c];
          }
        }
      }
    }
  }
}

/*! \brief Add the lanes of `count` columns. Zeros follow the lanes from `rest` on if it is not 0.
 */
TVM_IPC_INLINE Floats SumLanes(const float* lanes, int64_t stride, int64_t rest) {
  Floats l[kLanes];
#pragma GCC unroll 8
  for (int64_t q = 0; q < kLanes; ++q) {
    l[q] = Format<kFloat32>::Load((const char*)(lanes + q * stride));
    if (rest != 0 && q >= rest) l[q] += Floats{};  // +0 if it was -0
  }
  return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

/*! \brief Multiply kRows rows by weights that are contiguous along n. The elements of a lane of x
 *         follow each other. */
template <FloatType type, int kRows>
void AxpyInFixedOrder(const float* x, int64_t ldx, Weights weights, const Parts& parts, int64_t n,
                      float* y, int64_t ldy, float* scratch) {
  constexpr int64_t kBlock = kAlongNFloats / kRows / kLanes * kLanes;
  auto lanes = reinterpret_cast<float (*)[kAlongNFloats]>(scratch);
  auto levels = lanes + kLanes;
  const int64_t stride = weights.ld * Format<type>::kSize, rest = parts.size % kLanes;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t cols = n - begin < kBlock ? n - begin : kBlock;
    const char* w = weights.data + begin * Format<type>::kSize;
    const float* of_x = x;
    for (int64_t part = 0; part < parts.count; ++part, w += parts.size * stride) {
      for (int64_t q = 0; q < kLanes; ++q) {
        const int64_t deep = (parts.size - q + kLanes - 1) / kLanes;
        if (deep > 0) {
          AxpyStretch<type, kRows>(of_x, ldx, w + q * stride, kLanes * stride, deep, cols, lanes[q],
                                   kBlock, stride);
        } else {
          __builtin_memset(lanes[q], 0, sizeof(lanes[q]));
        }
        of_x += deep;
      }
      const int full = __builtin_ctzll(part + 1);
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t j = 0; j < cols; j += kLanes) {
          const int64_t at = r * kBlock + j;
          Floats sum = SumLanes(lanes[0] + at, kAlongNFloats, rest);
          for (int level = 0; level < full; ++level) {
            sum += Format<kFloat32>::Load((const char*)(levels[level] + at));
          }
          if (part + 1 < parts.count) {
            Format<kFloat32>::Store((char*)(levels[full] + at), sum);
          } else if (cols - j >= kLanes) {
            Format<kFloat32>::Store((char*)(y + r * ldy + begin + j), sum);
          } else {
            StorePart<kFloat32>((char*)(y + r * ldy + begin + j), sum, cols - j);
          }
        }
      }
    }
  }
}

#define TVM_IPC_FIXED_AXPY(type)                                                    \
  {AxpyInFixedOrder<type, 1>, AxpyInFixedOrder<type, 2>, AxpyInFixedOrder<type, 3>, \
   AxpyInFixedOrder<type, 4>}

}  // namespace

constexpr FixedOrderKernels kFixedOrderKernels = {
    6 * kFixedTileRows,
    {FewRowsInFixedOrder<kFloat16>, FewRowsInFixedOrder<kBFloat16>, FewRowsInFixedOrder<kFloat32>},
    {TVM_IPC_FIXED_AXPY(kFloat16), TVM_IPC_FIXED_AXPY(kBFloat16), TVM_IPC_FIXED_AXPY(kFloat32)},
    FixedOrderTiles,
    FixedLevelSize};

}  // namespace tvm_ipc
#endif  // __x86_64__
