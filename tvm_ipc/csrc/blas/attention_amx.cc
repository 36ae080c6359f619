/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file attention_amx.cc
 * \brief Attention of bfloat16 tensors in AMX tile registers; compiled with AMX, AVX-512 and its
 *        bfloat16 extension enabled. Empty on other architectures.
 *
 * Both matmuls of a block, of scores and of values, are in tiles of 16 x 16 sums. One instruction
 * adds 32 products to each sum. It adds those of even and of odd elements separately, and thus in
 * another order than the instruction for vectors. Single queries use the latter, because they are
 * limited by memory.
 */
#include "blas/kernels_complementing_blas.h"

#if defined(__x86_64__)
#include "blas/isa_amx.h"
#include "blas/kernels_attention_pairs.h"

namespace tvm_ipc {
namespace {

constexpr int64_t kTileRows = 16, kTileWords = 16, kLineBytes = 64;
constexpr int64_t kTileBytes = kTileRows * kLineBytes;
static_assert(kTileStep == 2 * kTileWords, "one instruction multiplies so many elements of a sum");
static_assert(kLanes == kTileWords && kBlockLanes == 2 * kTileWords, "two tiles have all rows");

constexpr int64_t RoundUp(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

/*! \brief `Terms` of kernels_attention.h that fill tiles. Zeros follow the last element of a query
 *         or key, and the last key of a tile. */
struct TileAttention : PairAttention {
  static constexpr int64_t PackedWords(int64_t depth) {
    return RoundUp(PairAttention::PackedWords(depth), kTileWords);
  }
  static void PackRow(FloatType, float* to, const char* from, int64_t depth) {
    for (int64_t i = depth / 2; i < PackedWords(depth); ++i) to[i] = 0;
    __builtin_memcpy(to, from, depth * 2);
  }
  static const float* PackKeys(FloatType type, float* to, const char* from, int64_t stride,
                               int64_t count, int64_t depth) {
    const int64_t words = PackedWords(depth);
    if (stride == depth && depth == 2 * words && count % kTileRows == 0) return (const float*)from;
    for (int64_t t = 0; t < count; ++t) PackRow(type, to + t * words, from + t * stride * 2, depth);
    for (int64_t i = count * words; i < RoundUp(count, kTileRows) * words; ++i) to[i] = 0;
    return to;
  }
  /*! \brief Pack values into tiles whose rows are elements, and whose words are pairs of keys: all
   *         elements of kTileStep keys, then those of the keys that follow. */
  static const float* PackValues(FloatType, float* to, const char* from, int64_t stride,
                                 int64_t count, int64_t depth) {
    float* tile = to;
    for (int64_t t = 0; t < count; t += kTileStep) {
      for (int64_t i = 0; i < depth; i += kTileRows, tile += kTileBytes / 4) {
        Floats pairs[kTileWords];
        for (int64_t p = 0; p < kTileWords; ++p) {
          const char* even = from + ((t + 2 * p) * stride + i) * 2;
          const int64_t left = count - t - 2 * p;
          const __m256i none = _mm256_setzero_si256();
          pairs[p] = Pairs(left > 0 ? Isa::Load16(even) : none,
                           left > 1 ? Isa::Load16(even + stride * 2) : none);
        }
        Isa::Transpose(pairs);
        for (int64_t r = 0; r < kTileRows; ++r) {
          Format<kFloat32>::Store((char*)(tile + r * kTileWords), pairs[r]);
        }
      }
    }
    return to;
  }
};

/*! \brief A matrix of one or two tiles below each other, for each step of a matmul. */
struct TileRows {
  const void* data;
  int64_t line, next_tile, next_step;  // bytes
};

/*!
 * \brief Multiply kRows tiles by kCols tiles, step by step. The products are added to `sums`
 * (kAdd), or replace them. b and the sums have lines of kBlockLanes words.
 */
template <int kRows, int kCols, bool kAdd>
void MultiplyTiles(TileRows a, const float* b, int64_t steps, float* sums) {
  constexpr int64_t kLine = kBlockLanes * 4;
  const char *of_a = (const char*)a.data, *of_b = (const char*)b;
  char *const upper = (char*)sums, *const lower = upper + kTileRows * kLine;
  // The compiler does not know which memory the instructions read.
  __asm__ volatile("" ::: "memory");
  if constexpr (kAdd) {
    _tile_loadd(0, upper, kLine);
    if constexpr (kCols > 1) _tile_loadd(1, upper + kLineBytes, kLine);
    if constexpr (kRows > 1) _tile_loadd(2, lower, kLine);
    if constexpr (kRows > 1 && kCols > 1) _tile_loadd(3, lower + kLineBytes, kLine);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(4, of_a, a.line);
    _tile_loadd(6, of_b, kLine);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kCols > 1) {
      _tile_loadd(7, of_b + kLineBytes, kLine);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRows > 1) {
      _tile_loadd(5, of_a + a.next_tile, a.line);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kCols > 1) _tile_dpbf16ps(3, 5, 7);
    }
    of_a += a.next_step;
    of_b += kTileWords * kLine;
  }
  _tile_stored(0, upper, kLine);
  if constexpr (kCols > 1) _tile_stored(1, upper + kLineBytes, kLine);
  if constexpr (kRows > 1) _tile_stored(2, lower, kLine);
  if constexpr (kRows > 1 && kCols > 1) _tile_stored(3, lower + kLineBytes, kLine);
  __asm__ volatile("" ::: "memory");
}

template <int kCols, bool kAdd>
void MultiplyTiles(bool two_rows, TileRows a, const float* b, int64_t steps, float* sums) {
  if (two_rows) {
    MultiplyTiles<2, kCols, kAdd>(a, b, steps, sums);
  } else {
    MultiplyTiles<1, kCols, kAdd>(a, b, steps, sums);
  }
}

template <>
struct AttentionMatmuls<TileAttention> {
  template <int kVectors>
  static void Score(const Attention& a, int64_t count, const float* keys, const float* queries,
                    float scale, float* scores) {
    const int64_t words = TileAttention::PackedWords(a.depth), steps = words / kTileWords;
    const int64_t line = words * 4;
    for (int64_t t = 0; t < count; t += 2 * kTileRows) {
      const TileRows rows{keys + t * words, line, kTileRows * line, kLineBytes};
      const bool two_rows = t + kTileRows < count;
      MultiplyTiles<kVectors, false>(two_rows, rows, queries, steps, scores + t * kBlockLanes);
    }
    for (int64_t t = 0; t < count; ++t) {
      for (int v = 0; v < kVectors; ++v) {
        char* const p = (char*)(scores + t * kBlockLanes + v * kLanes);
        Format<kFloat32>::Store(p, Format<kFloat32>::Load(p) * scale);
      }
    }
  }

  template <int kVectors>
  static void AddValues(const Attention& a, int64_t, int64_t count, int64_t number,
                        const float* values, float* weights, float* sums) {
    const int64_t steps = (count + kTileStep - 1) / kTileStep;
    for (int64_t p = (count + 1) / 2; p < steps * kTileWords; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        Format<kFloat32>::Store((char*)(weights + p * kBlockLanes + v * kLanes), Floats{});
      }
    }
    // Zero times infinity is not a number, so the values of hidden keys are replaced by zeros.
    const bool hidden = count < number && count % kTileStep != 0;
    for (int64_t i = 0; i < a.value_depth; i += 2 * kTileRows) {
      const char* tiles = (const char*)values + i / kTileRows * kTileBytes;
      const TileRows rows{tiles, kLineBytes, kTileBytes, a.value_depth * kLineBytes};
      float* const to = sums + i * kBlockLanes;
      const bool two_rows = i + kTileRows < a.value_depth;
      const int64_t whole = hidden ? steps - 1 : steps;
      MultiplyTiles<kVectors, true>(two_rows, rows, weights, whole, to);
      if (!hidden) continue;
      alignas(64) char seen[2 * kTileBytes];
      const auto mask = static_cast<__mmask32>((uint64_t{1} << (count % kTileStep)) - 1);
      const char* from = tiles + whole * rows.next_step;
      for (int64_t at = 0; at < (two_rows ? 2 : 1) * kTileBytes; at += kLineBytes) {
        _mm512_store_si512(seen + at, _mm512_maskz_loadu_epi16(mask, from + at));
      }
      const float* const of_last = weights + whole * kTileWords * kBlockLanes;
      const TileRows last{seen, kLineBytes, kTileBytes, 0};
      MultiplyTiles<kVectors, true>(two_rows, last, of_last, 1, to);
    }
  }
};

/*!
 * \brief Return whether attention is computed in tiles.
 *
 * Other calls use vectors: single queries are limited by memory, reproducible attention has one
 * order of sums, and operands of other depths do not fit into scratch memory or tiles.
 */
bool FitsTiles(const Attention& a) {
  return a.queries > 1 && !a.reproducible && a.depth >= kTileWords &&
         a.value_depth % kTileRows == 0;
}

void AttendRowsInTiles(const Attention& a, const AttentionHead& head, int64_t first, int64_t count,
                       int64_t begin, int64_t end, float* scratch, float* states) {
  if (!FitsTiles(a)) {
    kPairAttention.attend(a, head, first, count, begin, end, scratch, states);
    return;
  }
  BeginTiles();
  float* const for_keys = KeysInScratch(a, scratch);
  AttendHead<TileAttention>(a, head, first, count, begin, end, scratch, for_keys, states);
  EndTiles();
}

void AttendGroupsInTiles(const Attention& a, const AttentionHead* heads, int64_t groups,
                         const AttentionHead* next, int64_t first, int64_t count, int64_t begin,
                         int64_t end, float* scratch, float* states) {
  if (!FitsTiles(a)) {
    kPairAttention.attend_groups(a, heads, groups, next, first, count, begin, end, scratch, states);
    return;
  }
  BeginTiles();
  AttendHeads<TileAttention>(a, heads, groups, first, count, begin, end, scratch, states);
  EndTiles();
}

}  // namespace

constexpr AttentionKernels kTileAttention = {kBlockLanes,        kGroupBlocks* kBlockLanes,
                                             ClassifyBias,       AttendRowsInTiles,
                                             AddAttention,       StoreRows,
                                             kMostGroups,        kMostFewRows,
                                             AttendGroupsInTiles};

}  // namespace tvm_ipc
#endif  // __x86_64__
