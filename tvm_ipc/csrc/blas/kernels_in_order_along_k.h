/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_in_order_along_k.h
 * \brief Matmuls of few rows with weights that are contiguous along k, whose sums have the order of
 *        kernels_float32_packed.h; part of kernel_table_of_instruction_set.h for instruction sets
 *        with wide vectors.
 *
 * Each lane adds up one column, so no addition crosses lanes. A group of kLanes columns loads a
 * vector of 32-bit words of each column, and transposes them in registers. 16-bit weights are
 * transposed in pairs, and widened afterwards. Each sum waits for its last addition, so several
 * groups or rows are computed in turn.
 */
#ifndef TVM_IPC_BLAS_KERNELS_IN_ORDER_ALONG_K_H_
#define TVM_IPC_BLAS_KERNELS_IN_ORDER_ALONG_K_H_

#include "blas/kernels_float_conversion.h"

namespace tvm_ipc {
namespace {

/*! \brief Prefetch distance for each column, in bytes. */
constexpr int64_t kInOrderAhead = 512;

/*! \brief Weights of one type, in words of 32 bits. */
template <FloatType type>
struct WordsOf {
  static constexpr int64_t kSize = Format<type>::kSize;
  static constexpr int kPerWord = 4 / kSize;
  /*! \brief Steps of k in a vector of words. */
  static constexpr int64_t kSteps = kLanes * kPerWord;

  static TVM_IPC_INLINE Words Load(const char* p) {
    Words words;
    __builtin_memcpy(&words, p, sizeof(words));
    return words;
  }
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

/*! \brief x, and the weights of the columns that are computed at once. */
struct InOrderBlock {
  const float* x;
  int64_t ldx;
  const char* w;
  int64_t stride;  // bytes from one column to the next one
  int64_t cols;
  int64_t length;  // bytes of the weights of a column
};

/*! \brief Add up the steps [begin, begin + count) of k. Unless `kWhole`, there is one group of up
 * to kLanes columns. */
template <FloatType type, int kRows, int kGroups, bool kWhole>
TVM_IPC_INLINE void AddInOrder(const InOrderBlock& block, int64_t begin, int64_t count,
                               Floats (&sums)[kRows][kGroups]) {
  using Weight = WordsOf<type>;
  constexpr int kPerWord = Weight::kPerWord;
  const float* x = block.x + begin;
  const int64_t stride = block.stride;
  auto column = [&](const char* first, int64_t c) {
    // Lanes without a column compute the last one again.
    return first + (kWhole || c < block.cols ? c : block.cols - 1) * stride;
  };
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) sums[r][g] = Floats{};
  }
  int64_t i = 0;
  for (; i + Weight::kSteps <= count; i += Weight::kSteps) {
    const int64_t at = (begin + i) * Weight::kSize;
    const char* p = block.w + at;
    // The next weights of these columns, or the first ones of the next block.
    const char* ahead = p + kInOrderAhead;
    if (at + kInOrderAhead >= block.length) ahead += kGroups * kLanes * stride - block.length;
    const bool fetch = kWhole && (i * Weight::kSize) % 64 == 0;
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g, p += kLanes * stride, ahead += kLanes * stride) {
      if (fetch) {
#pragma GCC unroll 16
        for (int64_t q = 0; q < kLanes; ++q) __builtin_prefetch(ahead + q * stride, 0, 3);
      }
      Words words[kLanes];
#pragma GCC unroll 16
      for (int64_t q = 0; q < kLanes; ++q) words[q] = Weight::Load(column(p, q));
      Isa::Transpose(words);
#pragma GCC unroll 16
      for (int64_t q = 0; q < kLanes; ++q) {
        Floats weights[kPerWord];
        Weight::Widen(words[q], weights);
#pragma GCC unroll 2
        for (int h = 0; h < kPerWord; ++h) {
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            sums[r][g] += Splat(x[r * block.ldx + i + q * kPerWord + h]) * weights[h];
          }
        }
      }
    }
  }
  if (i == count) return;
  // The last vector that ends with the last step, or the first steps of k and zeros before them.
  const int64_t rest = count - i, end = begin + count;
  for (int g = 0; g < kGroups; ++g) {
    Words words[kLanes] = {};
    for (int64_t q = 0; q < kLanes; ++q) {
      const char* p = column(block.w, g * kLanes + q) + end * Weight::kSize;
      if (end >= Weight::kSteps) {
        words[q] = Weight::Load(p - sizeof(Words));
      } else {
        const int64_t bytes = end * Weight::kSize;
        __builtin_memcpy((char*)&words[q] + sizeof(Words) - bytes, p - bytes, bytes);
      }
    }
    Isa::Transpose(words);
    Floats weights[kLanes * kPerWord];
#pragma GCC unroll 16
    for (int64_t q = 0; q < kLanes; ++q) Weight::Widen(words[q], weights + q * kPerWord);
    for (int64_t q = 0; q < rest; ++q) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        sums[r][g] += Splat(x[r * block.ldx + i + q]) * weights[Weight::kSteps - rest + q];
      }
    }
  }
}

template <FloatType type, int kRows, int kGroups, bool kWhole>
void InOrderColumns(const InOrderBlock& block, const Parts& parts, float* y, int64_t ldy) {
  Floats sums[kRows][kGroups] = {}, more[kRows][kGroups];
  for (int64_t part = 0; part < parts.count; ++part) {
    const int64_t first = part * parts.size;
    for (int64_t i = 0; i < parts.size; i += kPackedDepth) {
      const int64_t deep = parts.size - i < kPackedDepth ? parts.size - i : kPackedDepth;
      if (i == 0) {
        AddInOrder<type, kRows, kGroups, kWhole>(block, first, deep, sums);
        continue;
      }
      AddInOrder<type, kRows, kGroups, kWhole>(block, first + i, deep, more);
      for (int r = 0; r < kRows; ++r) {
        for (int g = 0; g < kGroups; ++g) sums[r][g] += more[r][g];
      }
    }
    const int full = __builtin_ctzll(part + 1);
    auto level = [&](int l, int r, int g) {
      return (char*)(parts.levels + l * kLevelFloats + (r * kGroups + g) * kLanes);
    };
    for (int r = 0; r < kRows; ++r) {
      for (int g = 0; g < kGroups; ++g) {
        for (int l = 0; l < full; ++l) sums[r][g] += Format<kFloat32>::Load(level(l, r, g));
        if (part + 1 < parts.count) Format<kFloat32>::Store(level(full, r, g), sums[r][g]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int g = 0; g < kGroups; ++g) {
      char* to = (char*)(y + r * ldy + g * kLanes);
      if (kWhole || block.cols == kLanes) {
        Format<kFloat32>::Store(to, sums[r][g]);
      } else {
        StorePart<kFloat32>(to, sums[r][g], block.cols);
      }
    }
  }
}

template <FloatType type, int kRows>
void InOrder(const float* x, int64_t ldx, Weights weights, const Parts& parts, int64_t n, float* y,
             int64_t ldy) {
  constexpr int64_t kSize = Format<type>::kSize;
  constexpr int kGroups = kRows > 2 ? 1 : (kLanes < 16 && kSize == 2 ? 4 : 2) / kRows;
  constexpr int64_t kCols = kGroups * kLanes;
  static_assert(kRows * kCols <= kLevelFloats, "sums of a block are in a level");
  const int64_t length = parts.count * parts.size * kSize;
  InOrderBlock block{x, ldx, weights.data, weights.ld * kSize, kCols, length};
  int64_t j = 0;
  for (; j + kCols <= n; j += kCols, block.w += kCols * block.stride) {
    InOrderColumns<type, kRows, kGroups, true>(block, parts, y + j, ldy);
  }
  for (; j < n; j += kLanes, block.w += kLanes * block.stride) {
    block.cols = n - j < kLanes ? n - j : kLanes;
    InOrderColumns<type, kRows, 1, false>(block, parts, y + j, ldy);
  }
}

#define TVM_IPC_IN_ORDER(type) \
  { InOrder<type, 1>, InOrder<type, 2>, InOrder<type, 3>, InOrder<type, 4> }

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_IN_ORDER_ALONG_K_H_
