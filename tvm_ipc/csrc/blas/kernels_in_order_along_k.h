/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_in_order_along_k.h
 * \brief Matmuls of few rows with weights that are contiguous along k, whose sums have the order of
 *        kernels_float32_packed.h; part of kernel_table_of_instruction_set.h for instruction sets
 *        with wide vectors.
 *
 * Each lane adds up one column, so no addition crosses lanes. For a block of columns, chunks of k
 * are transposed into a buffer in the nearest cache, as 32-bit words: 16-bit weights in pairs, which
 * are widened when they are multiplied. Transposing needs no sums, so the processor overlaps it for
 * many columns, and the sums of several groups of columns do not wait for each other.
 */
#ifndef TVM_IPC_BLAS_KERNELS_IN_ORDER_ALONG_K_H_
#define TVM_IPC_BLAS_KERNELS_IN_ORDER_ALONG_K_H_

#include "blas/kernels_float_conversion.h"

namespace tvm_ipc {
namespace {

/*! \brief Columns of a block, and words of each column in a chunk: four cache lines. */
constexpr int64_t kInOrderCols = 64, kChunkWords = 64;
constexpr int kInOrderGroups = kInOrderCols / kLanes;

/*! \brief Weights of one type, in words of 32 bits. */
template <FloatType type>
struct WordsOf {
  static constexpr int64_t kSize = Format<type>::kSize;
  static constexpr int kPerWord = 4 / kSize;

  static TVM_IPC_INLINE void Widen(Words words, Floats* to) {
    if constexpr (type == kFloat32) {
      to[0] = (Floats)words;
    } else if constexpr (type == kBFloat16) {
      to[0] = (Floats)(words << 16);
      to[1] = (Floats)(words & 0xffff0000u);
    } else {
      Isa::WidenHalves((Isa::U32)words, to, to + 1);
    }
  }
};

/*!
 * \brief Transpose `bytes` of each of `cols` columns, which are `stride` bytes apart, and prefetch
 *        the same columns of `next`.
 */
inline void TransposeChunk(const char* w, int64_t stride, int64_t cols, int64_t bytes,
                           const char* next, Words (*to)[kInOrderGroups]) {
  constexpr int64_t kBytes = Isa::kBytes;
  for (int64_t g = 0; g * kLanes < cols; ++g, w += kLanes * stride, next += kLanes * stride) {
    const int64_t count = cols - g * kLanes;
    int64_t at = 0;
    for (; at + kBytes <= bytes && count >= kLanes; at += kBytes) {
      if (at % 64 == 0) {
        for (int64_t q = 0; q < kLanes; ++q) __builtin_prefetch(next + q * stride + at, 0, 2);
      }
      Words block[kLanes];
      Isa::LoadTransposed(w + at, stride, block);
#pragma GCC unroll 16
      for (int64_t q = 0; q < kLanes; ++q) to[at / 4 + q][g] = block[q];
    }
    for (; at < bytes; at += kBytes) {
      const int64_t length = bytes - at < kBytes ? bytes - at : kBytes;
      Words block[kLanes] = {};
      for (int64_t q = 0; q < kLanes && q < count; ++q) {
        __builtin_memcpy(&block[q], w + q * stride + at, length);
      }
      Isa::Transpose(block);
      for (int64_t q = 0; q * 4 < length; ++q) to[at / 4 + q][g] = block[q];
    }
  }
}

/*!
 * \brief Add the products of the steps [begin, end) of a chunk to the sums of kRows rows, which are
 *        kInOrderCols apart, and of the groups from `group` on. x begins at the chunk.
 */
template <FloatType type, int kRows, int kGroups>
TVM_IPC_INLINE void AddGroups(const float* x, int64_t ldx, const Words (*words)[kInOrderGroups],
                              int64_t begin, int64_t end, int group, float* y) {
  constexpr int kPerWord = WordsOf<type>::kPerWord;
  Floats sums[kRows][kGroups];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
      sums[r][g] = Format<kFloat32>::Load((char*)(y + r * kInOrderCols + (group + g) * kLanes));
    }
  }
  auto add = [&](int64_t i, int first, int last) __attribute__((always_inline)) {
    const Words* from = words[i / kPerWord] + group;
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
      Floats weights[kPerWord];
      WordsOf<type>::Widen(from[g], weights);
#pragma GCC unroll 2
      for (int h = first; h < last; ++h) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums[r][g] += Splat(x[r * ldx + i / kPerWord * kPerWord + h]) * weights[h];
        }
      }
    }
  };
  int64_t i = begin;
  if constexpr (kPerWord == 2) {
    if (i % 2 != 0) add(i++, 1, 2);
  }
  for (; i + kPerWord <= end; i += kPerWord) add(i, 0, kPerWord);
  if constexpr (kPerWord == 2) {
    if (i < end) add(i, 0, 1);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
      Format<kFloat32>::Store((char*)(y + r * kInOrderCols + (group + g) * kLanes), sums[r][g]);
    }
  }
}

/*! \brief AddGroups for the groups [group, groups), kGroups or a smaller power of two at a time. */
template <FloatType type, int kRows, int kGroups>
void AddRowsInOrder(const float* x, int64_t ldx, const Words (*words)[kInOrderGroups],
                    int64_t begin, int64_t end, int group, int groups, float* y) {
  for (; group + kGroups <= groups; group += kGroups) {
    AddGroups<type, kRows, kGroups>(x, ldx, words, begin, end, group, y);
  }
  if constexpr (kGroups > 1) {
    if (group < groups) {
      AddRowsInOrder<type, kRows, kGroups / 2>(x, ldx, words, begin, end, group, groups, y);
    }
  }
}

template <FloatType type>
void AddInOrder(const float* x, int64_t ldx, int64_t rows, const Words (*words)[kInOrderGroups],
                int64_t begin, int64_t end, int groups, float* y) {
  constexpr bool kMany = kLanes >= 16;  // registers
  for (; rows >= 4; rows -= 4, x += 4 * ldx, y += 4 * kInOrderCols) {
    AddRowsInOrder<type, 4, kMany ? 4 : 2>(x, ldx, words, begin, end, 0, groups, y);
  }
  if (rows == 3) AddRowsInOrder<type, 3, kMany ? 4 : 2>(x, ldx, words, begin, end, 0, groups, y);
  if (rows == 2) AddRowsInOrder<type, 2, 4>(x, ldx, words, begin, end, 0, groups, y);
  if (rows == 1) {
    AddRowsInOrder<type, 1, kMany ? 4 : 8>(x, ldx, words, begin, end, 0, groups, y);
  }
}

TVM_IPC_INLINE void AddFloats(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

template <FloatType type>
void InOrder(const float* x, int64_t ldx, int64_t rows, Weights weights, const Parts& parts,
             int64_t n, float* y, int64_t ldy) {
  using Weight = WordsOf<type>;
  constexpr int64_t kChunk = kChunkWords * Weight::kPerWord;  // steps
  constexpr int64_t kSums = kInOrderRows * kInOrderCols;
  static_assert(kSums <= kLevelFloats, "a level has the sums of a block");
  const int64_t stride = weights.ld * Weight::kSize, k = parts.count * parts.size;
  alignas(Isa::kBytes) Words words[kChunkWords][kInOrderGroups];
  // The sums of a part, and those of a block of steps.
  alignas(Isa::kBytes) float of_part[kSums], of_steps[kSums];
  const int64_t size = rows * kInOrderCols;
  for (int64_t j = 0; j < n; j += kInOrderCols) {
    const int64_t cols = n - j < kInOrderCols ? n - j : kInOrderCols;
    const int groups = (cols + kLanes - 1) / kLanes;
    const char* w = weights.data + j * stride;
    int64_t part = 0, in_part = 0;
    for (int64_t chunk = 0; chunk < k; chunk += kChunk) {
      const int64_t length = k - chunk < kChunk ? k - chunk : kChunk;
      const char* from = w + chunk * Weight::kSize;
      const char* next = chunk + kChunk < k ? from + 4 * kChunkWords : w + kInOrderCols * stride;
      TransposeChunk(from, stride, cols, length * Weight::kSize, next, words);
      for (int64_t i = 0, end; i < length; i = end) {
        // Up to the end of the chunk, of the part, or of a block of steps.
        const int64_t in_block = in_part % kPackedDepth;
        int64_t count = length - i;
        if (count > kPackedDepth - in_block) count = kPackedDepth - in_block;
        if (count > parts.size - in_part) count = parts.size - in_part;
        end = i + count;
        float* sums = in_part < kPackedDepth ? of_part : of_steps;
        if (in_block == 0) __builtin_memset(sums, 0, size * sizeof(float));
        AddInOrder<type>(x + chunk, ldx, rows, words, i, end, groups, sums);
        in_part += count;
        if (in_part % kPackedDepth != 0 && in_part < parts.size) continue;
        if (sums == of_steps) AddFloats(of_steps, size, of_part);
        if (in_part < parts.size) continue;
        const int64_t full = __builtin_ctzll(part + 1);
        for (int64_t level = 0; level < full; ++level) {
          AddFloats(parts.levels + level * kLevelFloats, size, of_part);
        }
        ++part;
        in_part = 0;
        if (part < parts.count) {
          __builtin_memcpy(parts.levels + full * kLevelFloats, of_part, size * sizeof(float));
        }
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      __builtin_memcpy(y + r * ldy + j, of_part + r * kInOrderCols, cols * sizeof(float));
    }
  }
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_IN_ORDER_ALONG_K_H_
