/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_attention_block.h
 * \brief Attention of a block of query rows to a block of keys; part of kernels_attention.h.
 */
#ifndef TVM_IPC_BLAS_KERNELS_ATTENTION_BLOCK_H_
#define TVM_IPC_BLAS_KERNELS_ATTENTION_BLOCK_H_

#include "blas/kernels_attention_mask.h"
#include "blas/kernels_epilogue.h"

namespace tvm_ipc {
namespace {

/*! \brief Elements of the first operand whose sums are in registers at the same time. */
constexpr int kAttentionTile = Isa::kBytes == 64 ? 8 : 6;

/*! \brief Operands of attention as float32, into which other types are widened. */
struct WidenedAttention {
  /*! \brief The elements of an operand that are multiplied and added at once. */
  static constexpr int64_t kTerms = 1;
  /*! \brief Return the number of words of a packed query or key. */
  static constexpr int64_t PackedWords(int64_t depth) { return depth; }
  static TVM_IPC_INLINE Floats Broadcast(const float* p) { return Splat(*p); }
  static TVM_IPC_INLINE Floats Add(Floats sum, Floats a, Floats b) { return sum + a * b; }
  /*! \brief Store a query: terms that follow each other are along the depth. */
  static void PackRow(FloatType type, float* to, const char* from, int64_t depth) {
    WidenAny(type, to, from, depth);
  }
  /*! \brief Return the keys of a block, packed like queries. Keys that are apart are copied too,
   *         because the processor would not prefetch them. */
  static const float* PackKeys(FloatType type, float* to, const char* from, int64_t stride,
                               int64_t count, int64_t depth) {
    if (type == kFloat32 && stride == depth) return (const float*)from;
    for (int64_t t = 0; t < count; ++t) {
      WidenAny(type, to + t * depth, from + t * stride * AttentionSize(type), depth);
    }
    return to;
  }
  /*! \brief Return the values of a block: terms that follow each other are of successive keys. */
  static const float* PackValues(FloatType type, float* to, const char* from, int64_t stride,
                                 int64_t count, int64_t depth) {
    return PackKeys(type, to, from, stride, count, depth);
  }
  /*! \brief Store the weights of kTerms successive keys. */
  static TVM_IPC_INLINE void StoreWeights(float* to, const Floats* weights) {
    Format<kFloat32>::Store((char*)to, *weights);
  }
};

/*!
 * \brief sums[i] = factor * sum over k of a[i * step_i + k * step_k] * b[k], where sums[i] and b[k]
 *        are kVectors vectors, kBlockLanes elements apart. With kAdd, the sum over k is added to
 *        sums[i], and the factor is 1.
 */
template <typename Terms, int kRows, int kVectors, bool kAdd>
TVM_IPC_INLINE void AttentionTile(const float* a, int64_t step_i, int64_t step_k, int64_t depth,
                                  const float* b, float factor, float* sums) {
  Floats sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const char* from = (const char*)(sums + i * kBlockLanes + v * kLanes);
      sum[i][v] = kAdd ? Format<kFloat32>::Load(from) : Floats{};
    }
  }
  for (int64_t k = 0; k < depth; ++k, a += step_k, b += kBlockLanes) {
    Floats row[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      row[v] = Format<kFloat32>::Load((const char*)(b + v * kLanes));
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Floats x = Terms::Broadcast(a + i * step_i);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[i][v] = Terms::Add(sum[i][v], x, row[v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      if (!kAdd) sum[i][v] *= factor;
      Format<kFloat32>::Store((char*)(sums + i * kBlockLanes + v * kLanes), sum[i][v]);
    }
  }
}

/*! \brief The same for any number of rows of a: tiles of kRows rows, and smaller ones for the rest.
 */
template <typename Terms, int kVectors, bool kAdd, int kRows = kAttentionTile>
void AttentionMatmul(const float* a, int64_t step_i, int64_t step_k, int64_t rows, int64_t depth,
                     const float* b, float factor, float* sums) {
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows) {
    AttentionTile<Terms, kRows, kVectors, kAdd>(a + i * step_i, step_i, step_k, depth, b, factor,
                                                sums + i * kBlockLanes);
  }
  if constexpr (kRows > 1) {
    constexpr int kFewer = kRows > 4 ? 4 : kRows / 2;
    AttentionMatmul<Terms, kVectors, kAdd, kFewer>(a + i * step_i, step_i, step_k, rows - i, depth,
                                                   b, factor, sums + i * kBlockLanes);
  }
}

/*! \brief Up to this many rows, lanes are elements of the values, and not rows. */
constexpr int64_t kFewAttentionRows = 4;

/*!
 * \brief sums[i] += sum over k of values[k * depth + i] * weights[k], as AttentionMatmul computes
 *        it for one row, whose sums and weights are kBlockLanes elements apart. The bits are the
 * same, for each sum adds the same products in the same order.
 */
template <typename Terms>
void AddValuesOfRow(const float* values, int64_t depth, int64_t count, const float* weights,
                    float* sums) {
  constexpr int kVectors = 4;
  constexpr int64_t kStep = kVectors * kLanes;
  int64_t i = 0;
  for (; i + kStep <= depth; i += kStep) {
    alignas(Isa::kBytes) float own[kStep];
    for (int64_t j = 0; j < kStep; ++j) own[j] = sums[(i + j) * kBlockLanes];
    Floats sum[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[v] = Format<kFloat32>::Load((const char*)(own + v * kLanes));
    }
    for (int64_t k = 0; k < count; ++k) {
      const Floats weight = Terms::Broadcast(weights + k * kBlockLanes);
      const float* from = values + k * depth + i;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sum[v] =
            Terms::Add(sum[v], Format<kFloat32>::Load((const char*)(from + v * kLanes)), weight);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Format<kFloat32>::Store((char*)(own + v * kLanes), sum[v]);
    }
    for (int64_t j = 0; j < kStep; ++j) sums[(i + j) * kBlockLanes] = own[j];
  }
  for (; i < depth; i += kLanes) {
    const int64_t width = depth - i < kLanes ? depth - i : kLanes;
    alignas(Isa::kBytes) float own[kLanes] = {};
    for (int64_t j = 0; j < width; ++j) own[j] = sums[(i + j) * kBlockLanes];
    Floats sum = Format<kFloat32>::Load((const char*)own);
    for (int64_t k = 0; k < count; ++k) {
      const Floats value = LoadPart<kFloat32>((const char*)(values + k * depth + i), width);
      sum = Terms::Add(sum, value, Terms::Broadcast(weights + k * kBlockLanes));
    }
    Format<kFloat32>::Store((char*)own, sum);
    for (int64_t j = 0; j < width; ++j) sums[(i + j) * kBlockLanes] = own[j];
  }
}

TVM_IPC_INLINE Floats Tanh(Floats x) { return 1.0f - 2.0f / (1.0f + Exp(2.0f * x)); }

/*! \brief Return 2 to the power x, which must not be positive, with a relative error of 1e-7; 0
 *         where that is below the smallest normal number. */
TVM_IPC_INLINE Floats Exp2OrZero(Floats x) {
  const Floats low = Splat(-126.0f), magic = Splat(12582912.0f);
  const Ints number = ~(Ints)(x < low);
  const Floats kept = x < low ? low : x;
  // Adding `magic` rounds to an integer, which is then in the low bits.
  const Floats shifted = kept + magic;
  const Floats rest = kept - (shifted - magic);
  // The minimax polynomial for |rest| <= 1/2.
  Floats sum = rest * 0.0001534581242594868f + 0.0013399930903688073f;
  sum = sum * rest + 0.009618489071726799f;
  sum = sum * rest + 0.05550328642129898f;
  sum = sum * rest + 0.24022646248340607f;
  sum = sum * rest + 0.6931471824645996f;
  sum = sum * rest + 1.0f;
  // The integer is added to the exponent; the other bits of `shifted` are shifted out.
  return (Floats)((Ints)((Words)sum + ((Words)shifted << 23)) & number);
}

/*!
 * \brief Replace scores, in units of the logarithm to base 2, with weights, and update the maximum
 *        and the sum of each row.
 * \param factors Receives the factors of the earlier sums.
 * \return Whether a factor is not 1.
 */
template <typename Terms, int kVectors>
bool Weigh(int64_t count, float* scores, float* most, float* total, float* factors) {
  // Rows without a key so far keep a maximum of minus infinity; their weights are 0.
  const Floats lowest = Splat(-__builtin_inff()), zero = {};
  Floats before[kVectors], top[kVectors], from[kVectors], sum[kVectors];
  auto at = [&](int64_t t, int v) { return scores + t * kBlockLanes + v * kLanes; };
  auto load = [](const float* p) { return Format<kFloat32>::Load((const char*)p); };
  for (int v = 0; v < kVectors; ++v) before[v] = top[v] = load(most + v * kLanes);
  for (int64_t t = 0; t < count; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Floats score = load(at(t, v));
      top[v] = score > top[v] ? score : top[v];
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    from[v] = top[v] == lowest ? zero : top[v];
    sum[v] = zero;
  }
  for (int64_t t = 0; t < count; t += Terms::kTerms) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Floats weights[Terms::kTerms];
#pragma GCC unroll 2
      for (int64_t i = 0; i < Terms::kTerms; ++i) {
        weights[i] = i == 0 || t + i < count ? Exp2OrZero(load(at(t + i, v)) - from[v]) : zero;
        sum[v] += weights[i];
      }
      Terms::StoreWeights(at(t / Terms::kTerms, v), weights);
    }
  }
  Ints changed = {};
  for (int v = 0; v < kVectors; ++v) {
    const Floats factor = Exp2OrZero(before[v] - from[v]);
    changed |= ~(Ints)(before[v] == top[v]);
    char* const of_all = (char*)(total + v * kLanes);
    Format<kFloat32>::Store((char*)(most + v * kLanes), top[v]);
    Format<kFloat32>::Store(of_all, Format<kFloat32>::Load(of_all) * factor + sum[v]);
    Format<kFloat32>::Store((char*)(factors + v * kLanes), factor);
  }
  return AnyLane(changed);
}

/*! \brief Cap scores, and change their units from the natural logarithm to that to base 2. */
template <int kVectors>
void CapScores(float cap, int64_t count, float* scores) {
  for (int64_t t = 0; t < count; ++t) {
    for (int v = 0; v < kVectors; ++v) {
      char* p = (char*)(scores + t * kBlockLanes + v * kLanes);
      const Floats score = Tanh(Format<kFloat32>::Load(p) / cap) * (cap * kLog2E);
      Format<kFloat32>::Store(p, score);
    }
  }
}

template <int kVectors>
void ScaleSums(int64_t count, const float* factors, float* sums) {
  Floats factor[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    factor[v] = Format<kFloat32>::Load((const char*)(factors + v * kLanes));
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      char* p = (char*)(sums + i * kBlockLanes + v * kLanes);
      Format<kFloat32>::Store(p, Format<kFloat32>::Load(p) * factor[v]);
    }
  }
}

constexpr int64_t AttentionStateSize(int64_t value_depth) {
  return (value_depth + 2) * kBlockLanes;
}

/*! \brief The state of a block of rows: maxima, sums of weights, and sums of values per element. */
struct AttentionState {
  float *most, *total, *sums;
  explicit AttentionState(float* memory)
      : most(memory), total(memory + kBlockLanes), sums(memory + 2 * kBlockLanes) {}
  /*! \brief Move the sums of `count` rows from one row after another to lanes. */
  void SeparateRows(int64_t count, int64_t depth, float* scratch) const {
    __builtin_memcpy(scratch, sums, count * depth * sizeof(float));
    for (int64_t i = 0; i < depth; ++i) {
      for (int64_t r = 0; r < count; ++r) sums[i * kBlockLanes + r] = scratch[r * depth + i];
    }
  }
  void Clear(int64_t depth) const {
    for (int64_t i = 0; i < kBlockLanes; ++i) most[i] = -__builtin_inff();
    for (int64_t i = 0; i < (depth + 1) * kBlockLanes; ++i) total[i] = 0;
  }
};

/*! \brief The matmuls of AttendBlock, in vectors; attention_amx.cc specializes them for AMX. */
template <typename Terms>
struct AttentionMatmuls {
  /*! \brief Compute the scores of `count` keys: vectors of rows for each key. */
  template <int kVectors>
  static TVM_IPC_INLINE void Score(const Attention& a, int64_t count, const float* keys,
                                   const float* queries, float scale, float* scores) {
    const int64_t words = Terms::PackedWords(a.depth);
    AttentionMatmul<Terms, kVectors, false>(keys, words, 1, count, words, queries, scale, scores);
  }
  /*! \brief Add the values of the first `count` of `number` packed keys to the sums of `rows` rows.
   *         Weights may be overwritten. */
  template <int kVectors>
  static TVM_IPC_INLINE void AddValues(const Attention& a, int64_t rows, int64_t count,
                                       int64_t number, const float* values, float* weights,
                                       float* sums) {
    const int64_t steps = (count + Terms::kTerms - 1) / Terms::kTerms;
    if (rows <= kFewAttentionRows) {
      for (int64_t r = 0; r < rows; ++r) {
        AddValuesOfRow<Terms>(values, a.value_depth, steps, weights + r, sums + r);
      }
    } else {
      AttentionMatmul<Terms, kVectors, true>(values, 1, a.value_depth, a.value_depth, steps,
                                             weights, 1.0f, sums);
    }
  }
};

/*! \brief Attend from up to kBlockLanes rows to one block of `number` keys. */
template <typename Terms, int kVectors>
void AttendBlock(const Attention& a, const AttentionRows& rows, const BlockMask& mask, int64_t key,
                 int64_t number, const float* queries, const float* keys, const float* values,
                 AttentionState state) {
  using Matmuls = AttentionMatmuls<Terms>;
  alignas(Isa::kBytes) float scores[kAttentionKeys * kBlockLanes];
  alignas(Isa::kBytes) float factors[kBlockLanes];
  const int64_t count = mask.count;
  const float scale = a.softcap > 0 ? a.scale : a.scale * kLog2E;
  Matmuls::template Score<kVectors>(a, count, keys, queries, scale, scores);
  if (a.softcap > 0) CapScores<kVectors>(a.softcap, count, scores);
  mask.Apply<kVectors>(a, rows, key, scores);
  if (Weigh<Terms, kVectors>(count, scores, state.most, state.total, factors)) {
    ScaleSums<kVectors>(a.value_depth, factors, state.sums);
  }
  Matmuls::template AddValues<kVectors>(a, rows.count, count, number, values, scores, state.sums);
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_ATTENTION_BLOCK_H_
