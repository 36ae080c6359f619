/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_attention_few_rows.h
 * \brief Attention of up to kFewAttentionRows query rows to a block of keys, such as that of the
 *        next token of a decoder; part of kernels_attention.h.
 *
 * Lanes of vectors are keys while scores are computed, and elements of the values afterwards, so
 * that no lane is idle. Each number is the sum of the same products in the same order as in
 * AttendBlock, so the bits are the same.
 */
#ifndef TVM_IPC_BLAS_KERNELS_ATTENTION_FEW_ROWS_H_
#define TVM_IPC_BLAS_KERNELS_ATTENTION_FEW_ROWS_H_

#include "blas/kernels_attention_block.h"

namespace tvm_ipc {
namespace {

/*!
 * \brief Tokens whose keys and values are prefetched while others are computed: a few lines at a
 *        time, because loads wait while as many lines are on their way as the processor can track.
 */
struct AttentionFetch {
  const char *keys, *values;
  int64_t key_stride, value_stride, key_bytes, value_bytes;
  int64_t tokens = 0;

  /*! \brief Prefetch one token, if there is one. */
  TVM_IPC_INLINE void Next() {
    if (tokens == 0) return;
    for (int64_t i = 0; i < key_bytes; i += 64) __builtin_prefetch(keys + i, 0, 2);
    for (int64_t i = 0; i < value_bytes; i += 64) __builtin_prefetch(values + i, 0, 2);
    keys += key_stride;
    values += value_stride;
    --tokens;
  }
};

/*! \brief A block of up to kAttentionKeys keys and values in the memory of the caller. */
struct KeyBlock {
  const char *keys, *values;
  int64_t count;
  float *packed_keys, *packed_values;  // scratch memory
};

/*!
 * \brief Set dots[r * kAttentionKeys + t] to the scalar product of query r and key t. That of keys
 *        after `count` is any number.
 */
template <FloatType type, int kRows>
void DotFewRows(const char* keys, int64_t stride, int64_t count, int64_t depth,
                const float* queries, float* dots) {
  constexpr int64_t kSize = Format<type>::kSize;
  // Keys are read a cache line at a time: other lines that are a stride apart may replace it.
  constexpr int64_t kLine = 64 / kSize;
  constexpr int kVectors = Isa::kBytes == 64 || kRows == 1 ? 64 / kLanes : kRows == 2 ? 4 : 2;
  alignas(64) float lines[kLine * kAttentionKeys];
  const int64_t groups = (count + kLanes * kVectors - 1) / (kLanes * kVectors);
  for (int64_t i = 0; i < depth; i += kLine) {
    const int64_t width = Smaller(depth - i, kLine);
    for (int64_t t = 0; t < groups * kVectors * kLanes; t += kLanes) {
      const int64_t some = Smaller(count - t, kLanes);
      for (int64_t j = 0; j < width; j += kLanes) {
        const char* from = keys + t * stride + (i + j) * kSize;
        Floats rows[kLanes];
        if (some == kLanes && width - j >= kLanes) {
#pragma GCC unroll 16
          for (int64_t k = 0; k < kLanes; ++k) rows[k] = Format<type>::Load(from + k * stride);
        } else {
          const int64_t part = Smaller(width - j, kLanes);
          for (int64_t k = 0; k < kLanes; ++k) {
            rows[k] = k < some ? LoadPart<type>(from + k * stride, part) : Floats{};
          }
        }
        Isa::Transpose(rows);
#pragma GCC unroll 16
        for (int64_t k = 0; k < kLanes; ++k) {
          Format<kFloat32>::Store((char*)(lines + (j + k) * kAttentionKeys + t), rows[k]);
        }
      }
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t t = g * kVectors * kLanes;
      Floats sums[kRows][kVectors];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          const float* at = dots + r * kAttentionKeys + t + v * kLanes;
          sums[r][v] = i == 0 ? Floats{} : Format<kFloat32>::Load((const char*)at);
        }
      }
      for (int64_t k = 0; k < width; ++k) {
        Floats of_keys[kVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          const float* at = lines + k * kAttentionKeys + t + v * kLanes;
          of_keys[v] = Format<kFloat32>::Load((const char*)at);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const Floats query = Splat(queries[r * depth + i + k]);
#pragma GCC unroll 16
          for (int v = 0; v < kVectors; ++v) sums[r][v] = sums[r][v] + of_keys[v] * query;
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          float* at = dots + r * kAttentionKeys + t + v * kLanes;
          Format<kFloat32>::Store((char*)at, sums[r][v]);
        }
      }
    }
  }
}

/*! \brief sums[r * depth + i] += sum over t of values[t][i] * weights[r * kAttentionKeys + t]. */
template <FloatType type, int kRows>
void AddValuesOfFewRows(const char* values, int64_t stride, int64_t count, int64_t depth,
                        const float* weights, float* sums) {
  constexpr int64_t kSize = Format<type>::kSize;
  constexpr int kVectors = kRows == 1 ? 8 : kRows == 2 || Isa::kBytes == 64 ? 4 : 2;
  constexpr int64_t kStep = kVectors * kLanes;
  int64_t i = 0;
  for (; i + kStep <= depth; i += kStep) {
    Floats sum[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = Format<kFloat32>::Load((const char*)(sums + r * depth + i + v * kLanes));
      }
    }
    const char* from = values + i * kSize;
    for (int64_t t = 0; t < count; ++t, from += stride) {
      Floats value[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) value[v] = Format<type>::Load(from + v * kLanes * kSize);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Floats weight = Splat(weights[r * kAttentionKeys + t]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[r][v] = sum[r][v] + value[v] * weight;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        Format<kFloat32>::Store((char*)(sums + r * depth + i + v * kLanes), sum[r][v]);
      }
    }
  }
  for (; i < depth; i += kLanes) {
    const int64_t width = Smaller(depth - i, kLanes);
    Floats sum[kRows];
    for (int r = 0; r < kRows; ++r) {
      sum[r] = LoadPart<kFloat32>((const char*)(sums + r * depth + i), width);
    }
    const char* from = values + i * kSize;
    for (int64_t t = 0; t < count; ++t, from += stride) {
      const Floats value = LoadPart<type>(from, width);
      for (int r = 0; r < kRows; ++r) {
        sum[r] = sum[r] + value * Splat(weights[r * kAttentionKeys + t]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      StorePart<kFloat32>((char*)(sums + r * depth + i), sum[r], width);
    }
  }
}

/*! \brief How AttendFewRows reads keys and values as operands of a type `Terms`. */
template <typename Terms>
struct FewRowOperands;

template <>
struct FewRowOperands<WidenedAttention> {
  template <int kRows>
  static void Dot(const Attention& a, const KeyBlock& block, int64_t count, const float* queries,
                  float* dots, AttentionFetch* fetch) {
    auto* const dot = a.type == kFloat16    ? DotFewRows<kFloat16, kRows>
                      : a.type == kBFloat16 ? DotFewRows<kBFloat16, kRows>
                                            : DotFewRows<kFloat32, kRows>;
    dot(block.keys, a.key_stride * AttentionSize(a.type), count, a.depth, queries, dots);
    fetch->Next();
  }
  template <int kRows>
  static void AddValues(const Attention& a, const KeyBlock& block, int64_t count,
                        const float* weights, float* sums, AttentionFetch* fetch) {
    auto* const add = a.type == kFloat16    ? AddValuesOfFewRows<kFloat16, kRows>
                      : a.type == kBFloat16 ? AddValuesOfFewRows<kBFloat16, kRows>
                                            : AddValuesOfFewRows<kFloat32, kRows>;
    add(block.values, a.value_stride * AttentionSize(a.type), count, a.value_depth, weights, sums);
    fetch->Next();
  }
};

/*! \brief Keep the compiler from fusing operations before and after: those of AttendBlock, whose
 *         bits must be the same, are not fused. */
TVM_IPC_INLINE void SeparatePhases(float* memory) {
  __asm__ volatile("" : : "r"(memory) : "memory");
}

/*!
 * \brief Replace scores, in units of the logarithm to base 2, with weights, and update the maxima
 *        and the sums of the state.
 * \param packed Receives the weights of each row, packed, if Terms are of several keys.
 */
template <typename Terms, int kRows>
void WeighFewRows(int64_t value_depth, int64_t count, float* scores, float* packed,
                  AttentionState state, AttentionFetch* fetch) {
  constexpr int kVectors = kAttentionKeys / kLanes;
  alignas(Isa::kBytes) float top[kLanes], sums[kLanes] = {}, factors[kLanes];
  auto load = [](const float* p) { return Format<kFloat32>::Load((const char*)p); };
  auto store = [](float* p, Floats v) { Format<kFloat32>::Store((char*)p, v); };
  // Lanes of `top`, `sums` and `factors` are rows; those without a row keep the state of no keys.
  const Floats lowest = Splat(-__builtin_inff()), zero = {};
  const Floats before = load(state.most);
  store(top, before);
  for (int r = 0; r < kRows; ++r) {
    Floats most = lowest;
    for (int v = 0; v < kVectors; ++v) {
      const Floats score = load(scores + r * kAttentionKeys + v * kLanes);
      most = score > most ? score : most;
    }
    for (int i = 0; i < kLanes; ++i) top[r] = most[i] > top[r] ? most[i] : top[r];
  }
  fetch->Next();
  const Floats from = load(top) == lowest ? zero : load(top);
  for (int r = 0; r < kRows; ++r) {
    float* const row = scores + r * kAttentionKeys;
    for (int v = 0; v < kVectors; v += Terms::kTerms) {
      Floats weights[Terms::kTerms];
      for (int64_t i = 0; i < Terms::kTerms; ++i) {
        weights[i] = Exp2OrZero(load(row + (v + i) * kLanes) - Splat(from[r]));
        store(row + (v + i) * kLanes, weights[i]);
      }
      if constexpr (Terms::kTerms > 1) {
        Terms::StoreWeightsOfKeys(packed + r * kAttentionKeys + v / Terms::kTerms * kLanes,
                                  weights);
      }
    }
  }
  fetch->Next();
  for (int64_t t = 0; t < count; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[r] += scores[r * kAttentionKeys + t];
  }
  const Floats factor = Exp2OrZero(before - from);
  store(state.most, load(top));
  store(state.total, load(state.total) * factor + load(sums));
  if (AnyLane(~(Ints)(before == load(top)))) {
    store(factors, factor);
    for (int r = 0; r < kRows; ++r) {
      float* const row = state.sums + r * value_depth;
      for (int64_t i = 0; i < value_depth; ++i) row[i] *= factors[r];
    }
  }
}

/*!
 * \brief AttendBlock for kRows rows, with the same bits. `queries` has the packed queries of one
 *        row after another. So are the sums of values in `state`; `SeparateRows` brings them into
 *        the lanes.
 */
template <typename Terms, int kRows>
void AttendFewRows(const Attention& a, const AttentionRows& rows, const BlockMask& mask,
                   int64_t key, const float* queries, const KeyBlock& block, AttentionState state,
                   AttentionFetch* fetch) {
  alignas(64) float scores[kRows * kAttentionKeys], packed[kRows * kAttentionKeys];
  FewRowOperands<Terms>::template Dot<kRows>(a, block, mask.count, queries, scores, fetch);
  SeparatePhases(scores);
  const float scale = a.softcap > 0 ? a.scale : a.scale * kLog2E;
  for (float* p = scores; p < scores + kRows * kAttentionKeys; p += kLanes) {
    Floats score = Format<kFloat32>::Load((const char*)p) * scale;
    if (a.softcap > 0) score = Tanh(score / a.softcap) * (a.softcap * kLog2E);
    Format<kFloat32>::Store((char*)p, score);
  }
  SeparatePhases(scores);
  mask.ApplyToRows(a, rows, key, scores);
  SeparatePhases(scores);
  WeighFewRows<Terms, kRows>(a.value_depth, mask.count, scores, packed, state, fetch);
  FewRowOperands<Terms>::template AddValues<kRows>(a, block, mask.count,
                                                   Terms::kTerms > 1 ? packed : scores, state.sums,
                                                   fetch);
}

template <typename Terms>
void AttendFewRows(const Attention& a, const AttentionRows& rows, const BlockMask& mask,
                   int64_t key, const float* queries, const KeyBlock& block, AttentionState state,
                   AttentionFetch* fetch) {
  static_assert(kFewAttentionRows == 4, "of which there are cases");
  auto* const attend = rows.count == 1   ? AttendFewRows<Terms, 1>
                       : rows.count == 2 ? AttendFewRows<Terms, 2>
                       : rows.count == 3 ? AttendFewRows<Terms, 3>
                                         : AttendFewRows<Terms, 4>;
  attend(a, rows, mask, key, queries, block, state, fetch);
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_ATTENTION_FEW_ROWS_H_
