/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_attention_few_rows.h
 * \brief Attention of up to kMostFewRows query rows to a block of keys, such as that of the
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

inline const char* QueryAt(const Attention& a, const AttentionHead& head, int64_t row) {
  const int64_t at = row / a.queries * a.query_head + row % a.queries * a.query_stride;
  return head.queries + at * AttentionSize(a.type);
}

/*! \brief The most rows of queries of a head of keys that FewRowHeads takes. */
constexpr int64_t kMostFewRows = 2 * kFewAttentionRows;
static_assert(kMostFewRows <= kBlockLanes, "they have one state");
/*! \brief Heads of keys that are computed together. */
constexpr int64_t kMostGroups = 8;
/*! \brief Keys whose memory is read at once, for one head after another. */
constexpr int64_t kKeyStep = 2 * kLanes;

/*!
 * \brief Memory that is prefetched while other memory is read: a few cache lines at a time, because
 *        loads wait while as many lines are on their way as the processor can track.
 */
struct AttentionFetch {
  const char* at;
  int64_t stride, bytes;  // of a token
  int64_t tokens;
  int64_t lines;  // at a time
  int64_t offset = 0;

  TVM_IPC_INLINE void Next() {
    for (int64_t i = 0; i < lines && tokens > 0; ++i) {
      __builtin_prefetch(at + offset, 0, 2);
      offset += 64;
      if (offset >= bytes) {
        offset = 0;
        at += stride;
        --tokens;
      }
    }
  }
};

/*!
 * \brief Keys and values of one type as terms of WidenedAttention. PairOperands has the same
 *        members.
 */
template <FloatType type>
struct WidenedOperands : WidenedAttention {
  /*! \brief Terms of a key that are loaded at once. */
  static constexpr int64_t kKeyTerms = type == kBFloat16 ? 2 * kLanes : kLanes;
  /*! \brief Load kKeyTerms terms of kLanes keys, transposed. */
  static TVM_IPC_INLINE void LoadKeys(Floats* loaded, const char* from, int64_t stride) {
    if constexpr (type == kFloat16) {
#pragma GCC unroll 16
      for (int64_t k = 0; k < kLanes; ++k) loaded[k] = Format<type>::Load(from + k * stride);
      Isa::Transpose(loaded);
    } else {
      Isa::LoadTransposed(loaded, from, stride);  // bfloat16: pairs
    }
  }
  /*! \brief The same for the first `width` elements of `count` keys, and zeros. */
  static void LoadSomeKeys(Floats* loaded, const char* from, int64_t stride, int64_t count,
                           int64_t width) {
    for (int64_t k = 0; k < kLanes; ++k) {
      if (k >= count) {
        loaded[k] = Floats{};
      } else if constexpr (type == kBFloat16) {
        loaded[k] = Floats{};
        __builtin_memcpy(loaded + k, from + k * stride, width * 2);
      } else {
        loaded[k] = LoadPart<type>(from + k * stride, width);
      }
    }
    Isa::Transpose(loaded);
  }
  /*! \brief Return one term of the loaded keys. */
  static TVM_IPC_INLINE Floats TermOf(const Floats* loaded, int64_t k) {
    if constexpr (type != kBFloat16) return loaded[k];
    const Words pairs = (Words)loaded[k / 2];
    return (Floats)(k % 2 == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
  /*! \brief Load the terms of kTerms successive values. */
  static TVM_IPC_INLINE Floats LoadValues(const char* from, int64_t stride) {
    return Format<type>::Load(from);
  }
  /*! \brief The same for the first `width` elements of `count` values, and zeros. */
  static TVM_IPC_INLINE Floats LoadSomeValues(const char* from, int64_t stride, int64_t count,
                                              int64_t width) {
    return LoadPart<type>(from, width);
  }
};

/*!
 * \brief Set dots[r * kAttentionKeys + t] to the scalar product of query r and key t, for up to
 *        kKeyStep keys. That of keys after `count` is 0.
 */
template <typename Operands, int kRows>
void DotFewRows(const Attention& a, const char* keys, int64_t count, const float* queries,
                float* dots, AttentionFetch* fetch) {
  constexpr int64_t kTerms = Operands::kTerms, kKeyTerms = Operands::kKeyTerms;
  constexpr int kVectors = kKeyStep / kLanes;
  const int64_t size = AttentionSize(a.type), stride = a.key_stride * size;
  const int64_t terms = (a.depth + kTerms - 1) / kTerms;
  Floats sums[kRows][kVectors] = {};
  for (int64_t i = 0; i < terms; i += kKeyTerms) {
    const int64_t width = Smaller(terms - i, kKeyTerms);
    const int64_t elements = Smaller(a.depth - i * kTerms, kKeyTerms * kTerms);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const int64_t some = count - v * kLanes;
      const char* from = keys + v * kLanes * stride + i * kTerms * size;
      const float* query = queries + i;
      Floats loaded[kLanes];
      if (some >= kLanes && elements == kKeyTerms * kTerms) {
        Operands::LoadKeys(loaded, from, stride);
#pragma GCC unroll 32
        for (int64_t k = 0; k < kKeyTerms; ++k) {
          const Floats term = Operands::TermOf(loaded, k);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const Floats of_row = Operands::Broadcast(query + r * terms + k);
            sums[r][v] = Operands::Add(sums[r][v], term, of_row);
          }
        }
      } else {
        Operands::LoadSomeKeys(loaded, from, stride, some, elements);
        for (int64_t k = 0; k < width; ++k) {
          const Floats term = Operands::TermOf(loaded, k);
          for (int r = 0; r < kRows; ++r) {
            const Floats of_row = Operands::Broadcast(query + r * terms + k);
            sums[r][v] = Operands::Add(sums[r][v], term, of_row);
          }
        }
      }
      fetch->Next();
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Format<kFloat32>::Store((char*)(dots + r * kAttentionKeys + v * kLanes), sums[r][v]);
    }
  }
}

/*! \brief Elements of values whose sums are in registers at the same time. */
template <int kRows>
constexpr int64_t kElementsAtOnce = kLanes * (kRows == 1                        ? 8
                                              : kRows == 2 || Isa::kBytes == 64 ? 4
                                                                                : 2);

/*!
 * \brief sums[r * value_depth + i] += sum over t < count of values[t][i] times the weight t of row
 *        r. The packed weights of a row are kAttentionKeys floats apart.
 */
template <typename Operands, int kRows>
void AddValuesOfFewRows(const Attention& a, const char* values, int64_t count, const float* weights,
                        float* sums, AttentionFetch* fetch) {
  constexpr int64_t kTerms = Operands::kTerms;
  constexpr int64_t kStep = kElementsAtOnce<kRows>;
  constexpr int kVectors = kStep / kLanes;
  const int64_t size = AttentionSize(a.type), stride = a.value_stride * size;
  const int64_t depth = a.value_depth;
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
    const char* from = values + i * size;
    auto add = [&](int64_t t, auto load) {
      Floats value[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) value[v] = load(from + t * stride + v * kLanes * size);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Floats weight = Operands::Broadcast(weights + r * kAttentionKeys + t / kTerms);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[r][v] = Operands::Add(sum[r][v], value[v], weight);
      }
    };
    int64_t t = 0;
    for (; t + kTerms <= count; t += kTerms) {
      add(t, [&](const char* p) { return Operands::LoadValues(p, stride); });
      fetch->Next();
    }
    if (t < count) {
      add(t, [&](const char* p) { return Operands::LoadSomeValues(p, stride, count - t, kLanes); });
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
    for (int64_t t = 0; t < count; t += kTerms) {
      const Floats value = Operands::LoadSomeValues(values + t * stride + i * size, stride,
                                                    Smaller(count - t, kTerms), width);
      for (int r = 0; r < kRows; ++r) {
        const Floats weight = Operands::Broadcast(weights + r * kAttentionKeys + t / kTerms);
        sum[r] = Operands::Add(sum[r], value, weight);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      StorePart<kFloat32>((char*)(sums + r * depth + i), sum[r], width);
    }
  }
}

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
                  AttentionState state) {
  constexpr int kVectors = kAttentionKeys / kLanes;
  alignas(Isa::kBytes) float top[kLanes], sums[kLanes] = {}, factors[kLanes];
  auto load = [](const float* p) { return Format<kFloat32>::Load((const char*)p); };
  auto store = [](float* p, Floats v) { Format<kFloat32>::Store((char*)p, v); };
  // Lanes of `top`, `sums` and `factors` are rows; those after the last one keep their state.
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

/*! \brief Turn the dots of up to kAttentionKeys keys into weights. */
template <typename Terms, int kRows>
void WeighDots(const Attention& a, const AttentionRows& rows, const BlockMask& mask, int64_t key,
               float* scores, float* packed, AttentionState state) {
  SeparatePhases(scores);
  const float scale = a.softcap > 0 ? a.scale : a.scale * kLog2E;
  for (int r = 0; r < kRows; ++r) {
    float* const row = scores + r * kAttentionKeys;
    for (int64_t t = 0; t < mask.count; t += kLanes) {
      Floats score = Format<kFloat32>::Load((const char*)(row + t)) * scale;
      if (a.softcap > 0) score = Tanh(score / a.softcap) * (a.softcap * kLog2E);
      Format<kFloat32>::Store((char*)(row + t), score);
    }
  }
  SeparatePhases(scores);
  mask.ApplyToRows(a, rows, key, scores);
  SeparatePhases(scores);
  WeighFewRows<Terms, kRows>(a.value_depth, mask.count, scores, packed, state);
}

/*! \brief The functions above for one type and number of rows. */
struct FewRowKernels {
  void (*dot)(const Attention& a, const char* keys, int64_t count, const float* queries,
              float* dots, AttentionFetch* fetch);
  void (*weigh)(const Attention& a, const AttentionRows& rows, const BlockMask& mask, int64_t key,
                float* scores, float* packed, AttentionState state);
  void (*add_values)(const Attention& a, const char* values, int64_t count, const float* weights,
                     float* sums, AttentionFetch* fetch);
  /*! \brief Elements of a value and terms of a key after which `fetch->Next()` is called. */
  int64_t elements_at_once, terms_at_once;

  template <typename Operands, int kRows>
  static FewRowKernels Of() {
    return {DotFewRows<Operands, kRows>, WeighDots<Operands, kRows>,
            AddValuesOfFewRows<Operands, kRows>, kElementsAtOnce<kRows>, Operands::kKeyTerms};
  }
  template <typename Operands>
  static FewRowKernels Of(int64_t rows) {
    static_assert(kFewAttentionRows == 4, "of which there are cases");
    return rows == 1   ? Of<Operands, 1>()
           : rows == 2 ? Of<Operands, 2>()
           : rows == 3 ? Of<Operands, 3>()
                       : Of<Operands, 4>();
  }
};

/*! \brief Return the kernels for operands that AttendBlock takes as `Terms`. */
template <typename Terms>
FewRowKernels FewRowKernelsOf(FloatType type, int64_t rows);

template <>
inline FewRowKernels FewRowKernelsOf<WidenedAttention>(FloatType type, int64_t rows) {
  return type == kFloat16    ? FewRowKernels::Of<WidenedOperands<kFloat16>>(rows)
         : type == kBFloat16 ? FewRowKernels::Of<WidenedOperands<kBFloat16>>(rows)
                             : FewRowKernels::Of<WidenedOperands<kFloat32>>(rows);
}

/*!
 * \brief Up to kMostGroups heads of keys, each with the same number of rows of queries. Keys of all
 *        heads are read in the order of memory, kKeyStep tokens at a time, and so are values, while
 *        those that follow are prefetched.
 */
template <typename Terms>
struct FewRowHeads {
  const Attention& a;
  const AttentionHead* heads;
  int64_t groups, count;                        // of heads of keys, and of rows of each
  int64_t terms = Terms::PackedWords(a.depth);  // of a query

  /*! \brief Up to kFewAttentionRows rows of a head, of which the kernels compute so many. */
  struct Slice {
    int64_t group, first;
    const float* queries;
    FewRowKernels kernels;
    AttentionRows rows;
  };
  static constexpr int64_t kMostSlices = kMostGroups * kMostFewRows / kFewAttentionRows;
  int64_t number = 0;
  Slice slices[kMostSlices];

  FewRowHeads(const Attention& a, const AttentionHead* heads, int64_t groups, int64_t first,
              int64_t count, float* queries)
      : a(a), heads(heads), groups(groups), count(count) {
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t from = 0; from < count; from += kFewAttentionRows) {
        const int64_t some = Smaller(count - from, kFewAttentionRows);
        Slice& slice = slices[number++];
        slice.group = g;
        slice.first = from;
        slice.queries = queries;
        slice.kernels = FewRowKernelsOf<Terms>(a.type, some);
        slice.rows.Set(a, heads[g], first + from, some);
        for (int64_t r = 0; r < some; ++r, queries += terms) {
          Terms::PackRow(a.type, queries, QueryAt(a, heads[g], first + from + r), a.depth);
        }
      }
    }
  }

  /*! \brief Return the state of the rows of a slice, of which `states` has one for each head. */
  AttentionState StateOf(const Slice& slice, float* states) const {
    AttentionState state(states + slice.group * AttentionStateSize(a.value_depth));
    state.most += slice.first;
    state.total += slice.first;
    state.sums += slice.first * a.value_depth;
    return state;
  }

  AttentionFetch FetchOf(const char* first, const char* last, int64_t depth, int64_t stride,
                         int64_t token, int64_t tokens, int64_t calls) const {
    const int64_t element = AttentionSize(a.type);
    AttentionFetch fetch{first + token * stride * element, stride * element,
                         last - first + depth * element, tokens, 0};
    const int64_t lines = tokens * ((fetch.bytes + 63) / 64), all = calls * number;
    fetch.lines = (lines + all - 1) / all;
    return fetch;
  }
  AttentionFetch FetchKeys(const AttentionHead* of, int64_t token, int64_t tokens,
                           int64_t calls) const {
    const char* last = of->keys + (heads[groups - 1].keys - heads[0].keys);
    return FetchOf(of->keys, last, a.depth, a.key_stride, token, tokens, calls);
  }
  AttentionFetch FetchValues(int64_t token, int64_t tokens, int64_t calls) const {
    return FetchOf(heads[0].values, heads[groups - 1].values, a.value_depth, a.value_stride, token,
                   tokens, calls);
  }

  static int64_t Calls(int64_t elements, int64_t at_once) {
    return Greater((elements + at_once - 1) / at_once, 1);
  }

  /*!
   * \brief Attend to the block of keys from `key` to kAttentionKeys later, or `end`. Then those of
   *        `next` from `next_key` are read, if it is not nullptr.
   */
  void AttendKeys(int64_t key, int64_t end, float* states, const AttentionHead* next,
                  int64_t next_key) const {
    const int64_t element = AttentionSize(a.type);
    constexpr int64_t kSlice = kFewAttentionRows * kAttentionKeys, kScores = kMostSlices * kSlice;
    alignas(64) float scores[kScores], packed[Terms::kTerms > 1 ? kScores : 1];
    BlockMask masks[kMostSlices];
    int64_t most = 0;
    for (int64_t i = 0; i < number; ++i) {
      masks[i] = BlockMask(slices[i].rows, key, Smaller(end - key, kAttentionKeys));
      most = Greater(most, masks[i].count);
    }
    if (most == 0) return;
    const FewRowKernels& first = slices[0].kernels;
    const int64_t key_calls = Calls(terms, first.terms_at_once) * (kKeyStep / kLanes);
    const int64_t value_calls =
        Calls(a.value_depth, first.elements_at_once) * kKeyStep / Terms::kTerms;
    for (int64_t t = 0; t < most; t += kKeyStep) {
      const int64_t ahead = t + kKeyStep;
      AttentionFetch fetch =
          ahead < most ? FetchKeys(heads, key + ahead, Smaller(most - ahead, kKeyStep), key_calls)
                       : FetchValues(key, Smaller(most, kKeyStep), key_calls);
      for (int64_t i = 0; i < number; ++i) {
        if (t >= masks[i].count) continue;
        const char* keys = heads[slices[i].group].keys + (key + t) * a.key_stride * element;
        slices[i].kernels.dot(a, keys, Smaller(masks[i].count - t, kKeyStep), slices[i].queries,
                              scores + i * kSlice + t, &fetch);
      }
    }
    for (int64_t i = 0; i < number; ++i) {
      if (masks[i].count == 0) continue;
      slices[i].kernels.weigh(a, slices[i].rows, masks[i], key, scores + i * kSlice,
                              Terms::kTerms > 1 ? packed + i * kSlice : nullptr,
                              StateOf(slices[i], states));
    }
    const float* const weights = Terms::kTerms > 1 ? packed : scores;
    for (int64_t t = 0; t < most; t += kKeyStep) {
      const int64_t ahead = t + kKeyStep;
      AttentionFetch fetch{};
      if (ahead < most) {
        fetch = FetchValues(key + ahead, Smaller(most - ahead, kKeyStep), value_calls);
      } else if (next != nullptr) {
        fetch = FetchKeys(next, next_key, kKeyStep, value_calls);
      }
      for (int64_t i = 0; i < number; ++i) {
        if (t >= masks[i].count) continue;
        const char* values = heads[slices[i].group].values + (key + t) * a.value_stride * element;
        slices[i].kernels.add_values(a, values, Smaller(masks[i].count - t, kKeyStep),
                                     weights + i * kSlice + t / Terms::kTerms,
                                     StateOf(slices[i], states).sums, &fetch);
      }
    }
  }

  /*! \brief Set the states of the keys [begin, end), which are up to kAttentionPart, and read those
   *         of `next` from `next_key` afterwards. */
  void AttendPart(int64_t begin, int64_t end, float* states, float* scratch,
                  const AttentionHead* next, int64_t next_key) const {
    const int64_t size = AttentionStateSize(a.value_depth);
    for (int64_t g = 0; g < groups; ++g) {
      AttentionState(states + g * size).Clear(a.value_depth);
    }
    for (int64_t key = begin; key < end; key += kAttentionKeys) {
      const int64_t after = key + kAttentionKeys;
      AttendKeys(key, end, states, after < end ? heads : next, after < end ? after : next_key);
    }
    for (int64_t g = 0; g < groups; ++g) {
      AttentionState(states + g * size).SeparateRows(count, a.value_depth, scratch);
    }
  }
};

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_ATTENTION_FEW_ROWS_H_
