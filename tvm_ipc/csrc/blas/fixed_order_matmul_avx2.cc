/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file fixed_order_matmul_avx2.cc
 * \brief Matmuls whose sums have the order of Parts, for all instruction sets from AVX2 on;
 * compiled with AVX2, FMA and F16C. Empty on other architectures.
 *
 * A vector has the four lanes of one column in its lower half and those of another in its upper
 * half. For a group of eight steps, it first adds the products of the steps 0, 2, 4, and 6, and
 * then those of 1, 3, 5, and 7, so that words of two bfloat16 are widened without shuffles. Rows of
 * x have their steps in this order, and zeros after each part; they are loaded into both halves. At
 * the end of a part, the lanes of four vectors are added at once, and the result is added to the
 * tree. Sums that wait for others are kept as the digits of a binary counter: level l is free or
 * has the sum of 2^l parts. Part i finds as many levels as i ends with digits 1; these are added to
 * its sum, and the result is the next level.
 */
#if defined(__x86_64__)
#include "blas/isa_avx2.h"
#include "blas/kernels_axpy_along_n.h"

namespace tvm_ipc {
namespace {

constexpr int64_t kGroup = kFixedOrderGroup;
static_assert(kLanes == kGroup, "a vector has the lanes of two columns, and each has two steps");

/*! \brief Rows and columns of a tile: its sums and operands fill the registers. */
constexpr int kFixedTileRows = 3, kFixedTileCols = kFixedOrderCols;
constexpr int64_t kFixedTileFloats = kFixedTileRows * kFixedTileCols;
/*! \brief The most rows for which reading weights in place is faster than packing them. */
constexpr int64_t kFixedFewRows = 9;
/*! \brief Vectors of weights of a tile for half a group. Vector c has the columns c and c + 4. */
constexpr int kFixedPairs = kFixedTileCols / 2;
/*! \brief The most levels: k has at most 2^48 steps. */
constexpr int kFixedLevels = 48;
/*! \brief Bytes of rows of x that a tile of weights, which stays in the L1 cache, is multiplied by.
 */
constexpr int64_t kFixedBytesOfX = 64 << 10;
/*! \brief Prefetch distance for weights, in bytes, if x has few rows. */
constexpr int64_t kFixedAhead = 512;

/*! \brief Load a group of the columns at `low` and at `high`: its even and its odd steps. */
template <FloatType type>
TVM_IPC_INLINE void LoadGroup(const char* low, const char* high, Floats* even, Floats* odd) {
  if constexpr (type == kFloat32) {
    const float *lower = (const float*)low, *upper = (const float*)high;
    const __m256 first = _mm256_loadu2_m128(upper, lower);
    const __m256 last = _mm256_loadu2_m128(upper + kGroup / 2, lower + kGroup / 2);
    *even = (Floats)_mm256_shuffle_ps(first, last, 0x88);
    *odd = (Floats)_mm256_shuffle_ps(first, last, 0xdd);
  } else {
    const __m256i words = _mm256_loadu2_m128i((const __m128i*)high, (const __m128i*)low);
    if constexpr (type == kBFloat16) {
      *even = (Floats)((Words)words << 16);
      *odd = (Floats)((Words)words & 0xffff0000u);
    } else {
      const __m256i even_first = _mm256_broadcastsi128_si256(
          _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
      const __m256i halves = _mm256_shuffle_epi8(words, even_first);
      const __m256i all = _mm256_permute4x64_epi64(halves, 0xd8);
      *even = (Floats)Isa::WidenHalf(_mm256_castsi256_si128(all));
      *odd = (Floats)Isa::WidenHalf(_mm256_extracti128_si256(all, 1));
    }
  }
}

/*! \brief The same for the first `count` steps of a group, and zeros. */
template <FloatType type>
TVM_IPC_INLINE void LoadPartOfGroup(const char* low, const char* high, int64_t count, Floats* even,
                                    Floats* odd) {
  constexpr int64_t kSize = Format<type>::kSize;
  char both[2][kGroup * kSize] = {};
  __builtin_memcpy(both[0], low, count * kSize);
  __builtin_memcpy(both[1], high, count * kSize);
  LoadGroup<type>(both[0], both[1], even, odd);
}

/*! \brief Add up the lanes of vectors [row][pair]: a vector for each row. */
template <int kRows>
TVM_IPC_INLINE void AddLanes(const Floats (*lanes)[kFixedPairs], Floats* sums) {
  auto halves = [](Floats left, Floats right) {
    const __m256 a = (__m256)left, b = (__m256)right;
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  };
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) {
    const __m256 a = halves(lanes[r][0], lanes[r][1]), b = halves(lanes[r][2], lanes[r][3]);
    sums[r] = (Floats)_mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
  }
}

/*! \brief Compute the sums of all parts; `add_part(part, lanes)` adds the products of one. */
template <int kRows, typename AddPart>
TVM_IPC_INLINE void AddParts(int64_t count, Floats* sums, AddPart add_part) {
  Floats levels[kFixedLevels][kRows];
  for (int64_t part = 0;; ++part) {
    Floats lanes[kRows][kFixedPairs] = {};
    add_part(part, lanes);
    AddLanes<kRows>(lanes, sums);
    int level = 0;
    for (; part >> level & 1; ++level) {
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) sums[r] += levels[level][r];
    }
    if (part + 1 == count) return;
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) levels[level][r] = sums[r];
  }
}

/*! \brief Add the products of half a group of all rows and one pair of columns. */
template <int kRows>
TVM_IPC_INLINE void AddProducts(const Floats* of_x, Floats weights, int pair,
                                Floats (*lanes)[kFixedPairs]) {
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) lanes[r][pair] = Isa::Fma(of_x[r], weights, lanes[r][pair]);
}

TVM_IPC_INLINE Floats LoadTwice(const float* x) {
  return (Floats)_mm256_broadcast_ps((const __m128*)x);
}

/*! \brief Add the products of a group of all rows and one pair of columns. */
template <int kRows>
TVM_IPC_INLINE void AddGroup(const float* x, int64_t ldx, Floats even, Floats odd, int pair,
                             Floats (*lanes)[kFixedPairs]) {
  Floats values[kRows];
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) values[r] = LoadTwice(x + r * ldx);
  AddProducts<kRows>(values, even, pair, lanes);
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) values[r] = LoadTwice(x + r * ldx + kGroup / 2);
  AddProducts<kRows>(values, odd, pair, lanes);
}

// ---- few rows -----------------------------------------------------------------------------------

/*! \brief A matmul of few rows, which reads weights in place. Columns of a tile are `far` columns
 *         apart, so that weights are read as long streams, which the processor can predict. */
template <FloatType type>
struct FewFixedRows {
  static constexpr int64_t kSize = Format<type>::kSize;
  const float* x;
  int64_t ldx, rows;
  const char* w;
  int64_t stride;  // bytes
  Parts parts;
  float* y;
  int64_t ldy;

  template <int kRows>
  void Tile(int64_t row, int64_t column, int64_t far, int64_t cols) const {
    const char* of_w[kFixedTileCols];
#pragma GCC unroll 8
    for (int c = 0; c < kFixedTileCols; ++c) {
      of_w[c] = w + (column + (c < cols ? c : cols - 1) * far) * stride;
    }
    const float* of_x = x + row * ldx;
    Floats sums[kRows];
    AddParts<kRows>(parts.count, sums, [&](int64_t part, Floats(*lanes)[kFixedPairs]) {
      int64_t p = part * parts.size;
      const int64_t end = p + parts.size;
      const float* at_x = of_x + part * PaddedSteps(parts.size);
#pragma GCC unroll 2
      for (; p + kGroup <= end; p += kGroup, at_x += kGroup) {
#pragma GCC unroll 4
        for (int c = 0; c < kFixedPairs; ++c) {
          const char *low = of_w[c] + p * kSize, *high = of_w[c + kFixedPairs] + p * kSize;
          __builtin_prefetch(low + kFixedAhead, 0, 2);
          __builtin_prefetch(high + kFixedAhead, 0, 2);
          Floats even, odd;
          LoadGroup<type>(low, high, &even, &odd);
          AddGroup<kRows>(at_x, ldx, even, odd, c, lanes);
        }
      }
      if (p == end) return;
#pragma GCC unroll 4
      for (int c = 0; c < kFixedPairs; ++c) {
        Floats even, odd;
        LoadPartOfGroup<type>(of_w[c] + p * kSize, of_w[c + kFixedPairs] + p * kSize, end - p,
                              &even, &odd);
        AddGroup<kRows>(at_x, ldx, even, odd, c, lanes);
      }
    });
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      float* to = y + (row + r) * ldy + column;
      for (int64_t c = 0; c < cols; ++c) to[c * far] = sums[r][c];
    }
  }

  void Columns(int64_t column, int64_t far, int64_t cols) const {
    // The rows of tiles differ by one at most.
    const int64_t tiles = (rows + kFixedTileRows - 1) / kFixedTileRows;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = rows * tile / tiles, height = rows * (tile + 1) / tiles - row;
      if (height == 3) Tile<3>(row, column, far, cols);
      if (height == 2) Tile<2>(row, column, far, cols);
      if (height == 1) Tile<1>(row, column, far, cols);
    }
  }
};

template <FloatType type>
void FewRowsInFixedOrder(const float* x, int64_t ldx, int64_t rows, Weights weights,
                         const Parts& parts, int64_t n, float* y, int64_t ldy) {
  const int64_t stride = weights.ld * Format<type>::kSize, tiles = n / kFixedTileCols;
  const FewFixedRows<type> all{x, ldx, rows, weights.data, stride, parts, y, ldy};
  for (int64_t j = 0; j < tiles; ++j) all.Columns(j, tiles, kFixedTileCols);
  const int64_t done = tiles * kFixedTileCols;
  if (done < n) all.Columns(done, 1, n - done);
}

// ---- many rows ----------------------------------------------------------------------------------

int64_t FixedTilesOf(int64_t cols) { return (cols + kFixedTileCols - 1) / kFixedTileCols; }

/*! \brief Pack weights as FixedOrderBlock::weights. */
template <FloatType type>
void PackWeightsAlongK(const char* from, int64_t stride, int64_t steps, int64_t cols, float* to,
                       int64_t tile_floats) {
  constexpr int64_t kSize = Format<type>::kSize;
  for (int64_t j = 0; j < cols; j += kFixedTileCols, to += tile_floats) {
    const char* of_w[kFixedTileCols];
    for (int64_t c = 0; c < kFixedTileCols; ++c) {
      // The last column takes the place of those after it.
      of_w[c] = from + (j + c < cols ? j + c : cols - 1) * stride * kSize;
    }
    float* target = to;
    for (int64_t p = 0; p < steps; p += kGroup, target += kGroup * kFixedTileCols) {
#pragma GCC unroll 4
      for (int c = 0; c < kFixedPairs; ++c) {
        const char *low = of_w[c] + p * kSize, *high = of_w[c + kFixedPairs] + p * kSize;
        Floats even, odd;
        if (p + kGroup <= steps) {
          LoadGroup<type>(low, high, &even, &odd);
        } else {
          LoadPartOfGroup<type>(low, high, steps - p, &even, &odd);
        }
        Format<kFloat32>::Store((char*)(target + c * kLanes), even);
        Format<kFloat32>::Store((char*)(target + (kFixedPairs + c) * kLanes), odd);
      }
    }
  }
}

template <FloatType type>
void PackWeightsAlongN(const char* from, int64_t stride, int64_t steps, int64_t cols, float* to,
                       int64_t tile_floats) {
  constexpr int64_t kSize = Format<type>::kSize;
  for (int64_t j = 0; j < cols; j += kFixedTileCols, to += tile_floats) {
    const int64_t width = cols - j < kFixedTileCols ? cols - j : kFixedTileCols;
    char* target = (char*)to;
    for (int64_t p = 0; p < steps; p += kGroup) {
      const int64_t count = steps - p < kGroup ? steps - p : kGroup;
      Floats lines[kGroup];  // of the even steps, and of the odd ones
      const char* at = from + (p * stride + j) * kSize;
      if (width == kFixedTileCols && count == kGroup) {
#pragma GCC unroll 8
        for (int64_t q = 0; q < kGroup; ++q) {
          lines[q / 2 + q % 2 * (kGroup / 2)] = Format<type>::Load(at + q * stride * kSize);
        }
      } else {
        for (int64_t q = 0; q < kGroup; ++q) {
          lines[q / 2 + q % 2 * (kGroup / 2)] =
              q < count ? LoadPart<type>(at + q * stride * kSize, width) : Floats{};
        }
      }
      Isa::TransposeHalves(lines);
#pragma GCC unroll 8
      for (int64_t q = 0; q < kGroup; ++q, target += sizeof(Floats)) {
        Format<kFloat32>::Store(target, lines[q]);
      }
    }
  }
}

/*! \brief Bring the even steps of each group before its odd ones. */
void OrderSteps(float* x, int64_t count) {
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  for (int64_t i = 0; i < count; i += kGroup) {
    _mm256_storeu_ps(x + i, _mm256_permutevar8x32_ps(_mm256_loadu_ps(x + i), order));
  }
}

int64_t FixedLevelSize(int64_t rows, int64_t cols) {
  return (rows + kFixedTileRows - 1) / kFixedTileRows * FixedTilesOf(cols) * kFixedTileFloats;
}

void FixedOrderTiles(const FixedOrderBlock& block, float* levels, float* y, int64_t ldy) {
  const Parts& parts = block.parts;
  const int64_t depth = parts.count * parts.size;
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
      const float* of_w = block.weights + j * depth;
      for (int64_t i = first; i < end; i += kFixedTileRows) {
        const int64_t rows = end - i < kFixedTileRows ? end - i : kFixedTileRows;
        prefetch();
        // The last row takes the place of those after it.
        const float* of_x[kFixedTileRows];
#pragma GCC unroll 3
        for (int r = 0; r < kFixedTileRows; ++r) {
          of_x[r] = block.x + (i + (r < rows ? r : rows - 1)) * block.ldx;
        }
        Floats sums[kFixedTileRows];
        AddParts<kFixedTileRows>(parts.count, sums, [&](int64_t part, Floats(*lanes)[kFixedPairs]) {
          const float* weights = of_w + part * parts.size * kFixedTileCols;
          const int64_t size = parts.size, begin = part * size;
          const float *x0 = of_x[0] + begin, *x1 = of_x[1] + begin, *x2 = of_x[2] + begin;
#pragma GCC unroll 4
          for (int64_t p = 0; p < size; p += kGroup / 2) {
            const Floats values[] = {LoadTwice(x0 + p), LoadTwice(x1 + p), LoadTwice(x2 + p)};
#pragma GCC unroll 4
            for (int c = 0; c < kFixedPairs; ++c, weights += kLanes) {
              AddProducts<kFixedTileRows>(values, Format<kFloat32>::Load((const char*)weights), c,
                                          lanes);
            }
          }
        });
        float* waiting = levels + i / kFixedTileRows * row_size + j * kFixedTileRows;
        for (int level = 0; level < full; ++level, waiting += level_size) {
#pragma GCC unroll 3
          for (int r = 0; r < kFixedTileRows; ++r) {
            sums[r] += Format<kFloat32>::Load((const char*)(waiting + r * kLanes));
          }
        }
        if (!last) {
#pragma GCC unroll 3
          for (int r = 0; r < kFixedTileRows; ++r) {
            Format<kFloat32>::Store((char*)(waiting + r * kLanes), sums[r]);
          }
          continue;
        }
        for (int64_t r = 0; r < rows; ++r) {
          char* to = (char*)(y + (i + r) * ldy + j);
          if (cols == kFixedTileCols) {
            Format<kFloat32>::Store(to, sums[r]);
          } else {
            StorePart<kFloat32>(to, sums[r], cols);
          }
        }
      }
    }
  }
}

// ---- weights that are contiguous along n --------------------------------------------------------

/*! \brief Add the lanes of kLanes columns. If `rest` is not 0, the last group has so many steps,
 * and zeros after them. */
TVM_IPC_INLINE Floats SumLanes(const float* lanes, int64_t stride, int64_t rest) {
  Floats l[kFixedOrderLanes];
#pragma GCC unroll 4
  for (int64_t q = 0; q < kFixedOrderLanes; ++q) {
    l[q] = Format<kFloat32>::Load((const char*)(lanes + q * stride));
    if (rest != 0 && 2 * q + 1 >= rest) l[q] += Floats{};  // +0 if it was -0
  }
  return (l[0] + l[2]) + (l[1] + l[3]);
}

/*! \brief Multiply kRows rows by weights that are contiguous along n. The elements of a lane of x
 *         follow each other. */
template <FloatType type, int kRows>
void AxpyInFixedOrder(const float* x, int64_t ldx, Weights weights, const Parts& parts, int64_t n,
                      float* y, int64_t ldy, float* scratch) {
  constexpr int64_t kBlock = kAlongNFloats / kRows / kLanes * kLanes;
  auto lanes = reinterpret_cast<float (*)[kAlongNFloats]>(scratch);
  auto levels = lanes + kFixedOrderLanes;
  const int64_t stride = weights.ld * Format<type>::kSize, rest = parts.size % kGroup;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t cols = n - begin < kBlock ? n - begin : kBlock;
    const char* w = weights.data + begin * Format<type>::kSize;
    const float* of_x = x;
    for (int64_t part = 0; part < parts.count; ++part, w += parts.size * stride) {
      for (int64_t q = 0; q < kFixedOrderLanes; ++q) {
        const int64_t deep = StepsOfLane(parts.size, q);
        if (deep > 0) {
          AxpyStretch<type, kRows>(of_x, ldx, w + 2 * q * stride, stride, deep, cols, lanes[q],
                                   kBlock, stride, kGroup * stride);
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
    kFixedFewRows,
    {FewRowsInFixedOrder<kFloat16>, FewRowsInFixedOrder<kBFloat16>, FewRowsInFixedOrder<kFloat32>},
    {TVM_IPC_FIXED_AXPY(kFloat16), TVM_IPC_FIXED_AXPY(kBFloat16), TVM_IPC_FIXED_AXPY(kFloat32)},
    {PackWeightsAlongK<kFloat16>, PackWeightsAlongK<kBFloat16>, PackWeightsAlongK<kFloat32>},
    {PackWeightsAlongN<kFloat16>, PackWeightsAlongN<kBFloat16>, PackWeightsAlongN<kFloat32>},
    OrderSteps,
    FixedOrderTiles,
    FixedLevelSize};

}  // namespace tvm_ipc
#endif  // __x86_64__
