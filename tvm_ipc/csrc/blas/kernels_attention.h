/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_attention.h
 * \brief Attention of a block of query rows; part of kernel_table_of_instruction_set.h.
 *
 * Lanes of vectors are rows. Scores are thus computed in transposed form, one vector of rows for
 * each key: a key's or value's element is broadcast, and the maximum and the sum of the weights
 * need no reduction over lanes. Keys and values are read in the order of memory, a block of
 * kAttentionKeys at a time, and packed once for kGroupBlocks blocks of rows.
 *
 * Each row adds its keys in one order: blocks of kAttentionKeys begin at multiples of that number,
 * and so do the parts of the keys that the caller passes (kAttentionPart). A row's bits thus depend
 * on nothing but its query, keys and values: not on the rows beside it, nor on threads.
 */
#ifndef TVM_IPC_BLAS_KERNELS_ATTENTION_H_
#define TVM_IPC_BLAS_KERNELS_ATTENTION_H_

#include "blas/kernels_attention_few_rows.h"

namespace tvm_ipc {
namespace {

/*! \brief Blocks of kBlockLanes rows for which keys and values are packed once. Their queries and
 *         states stay in the L2 cache. */
constexpr int64_t kGroupBlocks = 256 / kBlockLanes;

/*! \brief The rows of a call, as blocks that share packed keys and values. */
template <typename Terms>
struct AttentionGroup {
  Attention a;
  AttentionHead head;
  int64_t blocks;
  AttentionRows rows[kGroupBlocks];
  float *queries, *keys, *values;

  /*! \brief Set the rows [first, first + count). Keys and values are packed into memory that other
   *         groups may use between their turns. */
  void Set(const Attention& attention, const AttentionHead& of_head, int64_t first, int64_t count,
           float* for_queries, float* for_keys) {
    a = attention;
    head = of_head;
    blocks = (count + kBlockLanes - 1) / kBlockLanes;
    queries = for_queries;
    keys = for_keys;
    values = keys + a.depth * kAttentionKeys;
    const int64_t words = Terms::PackedWords(a.depth), element = AttentionSize(a.type);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t from = first + b * kBlockLanes;
      rows[b].Set(a, head, from, Smaller(count - b * kBlockLanes, kBlockLanes));
      for (int64_t r = 0; r < kBlockLanes; ++r) {
        // Queries are apart, so that the processor does not prefetch them.
        for (int64_t d = 0; r + kPrefetched < rows[b].count && d < a.depth; d += 64 / element) {
          __builtin_prefetch(Query(from + r + kPrefetched) + d * element);
        }
        Terms::PackRow(a.type, keys, Query(from + (r < rows[b].count ? r : 0)), a.depth);
        for (int64_t d = 0; d < words; ++d) {
          __builtin_memcpy(QueriesOf(b) + d * kBlockLanes + r, keys + d, 4);
        }
      }
    }
  }

  static constexpr int64_t kPrefetched = 8;
  const char* Query(int64_t row) const { return QueryAt(a, head, row); }
  float* QueriesOf(int64_t block) const { return queries + block * a.depth * kBlockLanes; }

  void Clear(float* states) const {
    for (int64_t b = 0; b < blocks; ++b) {
      AttentionState(states + b * AttentionStateSize(a.value_depth)).Clear(a.value_depth);
    }
  }

  /*! \brief Attend to the block of keys from `key` to kAttentionKeys later, or `end`. */
  void AttendKeys(int64_t key, int64_t end, float* states) const {
    const int64_t size = AttentionStateSize(a.value_depth), element = AttentionSize(a.type);
    const int64_t number = Smaller(end - key, kAttentionKeys);
    const float *of_keys = nullptr, *of_values = nullptr;
    for (int64_t b = 0; b < blocks; ++b) {
      const BlockMask mask(rows[b], key, number);
      if (mask.count == 0) continue;
      if (of_keys == nullptr) {
        of_keys = Terms::PackKeys(a.type, keys, head.keys + key * a.key_stride * element,
                                  a.key_stride, number, a.depth);
        of_values = Terms::PackValues(a.type, values, head.values + key * a.value_stride * element,
                                      a.value_stride, number, a.value_depth);
      }
      const AttentionState state(states + b * size);
      if (rows[b].count <= kLanes) {
        AttendBlock<Terms, 1>(a, rows[b], mask, key, number, QueriesOf(b), of_keys, of_values,
                              state);
      } else {
        AttendBlock<Terms, 2>(a, rows[b], mask, key, number, QueriesOf(b), of_keys, of_values,
                              state);
      }
    }
  }

  void AttendPart(int64_t begin, int64_t end, float* states) const {
    Clear(states);
    for (int64_t key = begin; key < end; key += kAttentionKeys) AttendKeys(key, end, states);
  }
};

void AddAttention(const Attention& a, int64_t count, const float* later_states, float* states) {
  const int64_t size = AttentionStateSize(a.value_depth);
  for (int64_t block = 0; block * kBlockLanes < count; ++block) {
    const float* later = later_states + block * size;
    float* to = states + block * size;
    for (int64_t r = 0; r < kBlockLanes; r += kLanes) {
      auto load = [&](const float* p) { return Format<kFloat32>::Load((const char*)(p + r)); };
      const Floats one = load(to), other = load(later);  // the maxima stand first
      const Floats top = other > one ? other : one;
      const Floats lowest = Splat(-__builtin_inff()), zero = {};
      const Floats from = top == lowest ? zero : top;
      const Floats of_one = Exp2OrZero(one - from), of_other = Exp2OrZero(other - from);
      Format<kFloat32>::Store((char*)(to + r), top);
      for (int64_t i = 1; i < a.value_depth + 2; ++i) {  // sums of weights, and of values
        const int64_t at = i * kBlockLanes;
        const Floats sum = load(to + at) * of_one + load(later + at) * of_other;
        Format<kFloat32>::Store((char*)(to + at + r), sum);
      }
    }
  }
}

/*! \brief Attend to the keys [begin, end) a part at a time; `attend` computes the states of one. */
template <typename Attend>
void AttendParts(const Attention& a, int64_t groups, int64_t count, int64_t begin, int64_t end,
                 float* states, float* later, Attend attend) {
  const int64_t size = (count + kBlockLanes - 1) / kBlockLanes * AttentionStateSize(a.value_depth);
  for (int64_t part = begin; part == begin || part < end; part += kAttentionPart) {
    float* const own = part == begin ? states : later;
    attend(part, Smaller(end, part + kAttentionPart), own);
    if (part == begin) continue;
    for (int64_t g = 0; g < groups; ++g) AddAttention(a, count, own + g * size, states + g * size);
  }
}

/*! \brief Attend from rows of a head, in blocks that share packed keys and values. */
template <typename Terms>
void AttendHead(const Attention& a, const AttentionHead& head, int64_t first, int64_t count,
                int64_t begin, int64_t end, float* for_queries, float* for_keys, float* states) {
  AttentionGroup<Terms> group;
  group.Set(a, head, first, count, for_queries, for_keys);
  float* const later = group.values + a.value_depth * kAttentionKeys;
  AttendParts(a, 1, count, begin, end, states, later,
              [&](int64_t part, int64_t stop, float* own) { group.AttendPart(part, stop, own); });
}

/*! \brief Return where packed keys and values are in the scratch memory of `attend`. */
inline float* KeysInScratch(const Attention& a, float* scratch) {
  return scratch + a.depth * kGroupBlocks * kBlockLanes;
}

/*! \brief Attend from rows of several heads, one head after another. */
template <typename Terms>
void AttendHeads(const Attention& a, const AttentionHead* heads, int64_t groups, int64_t first,
                 int64_t count, int64_t begin, int64_t end, float* scratch, float* states) {
  float* const for_keys = scratch + groups * a.depth * kBlockLanes;
  for (int64_t g = 0; g < groups; ++g) {
    AttendHead<Terms>(a, heads[g], first, count, begin, end, scratch, for_keys,
                      states + g * AttentionStateSize(a.value_depth));
  }
}

template <typename Terms>
void AttendGroups(const Attention& a, const AttentionHead* heads, int64_t groups,
                  const AttentionHead* next, int64_t first, int64_t count, int64_t begin,
                  int64_t end, float* scratch, float* states) {
  if (count > kMostFewRows) {
    AttendHeads<Terms>(a, heads, groups, first, count, begin, end, scratch, states);
    return;
  }
  float* const for_keys = scratch + groups * a.depth * kBlockLanes;
  float* const later = for_keys + (a.depth + a.value_depth) * kAttentionKeys;
  const FewRowHeads<Terms> few(a, heads, groups, first, count, scratch);
  AttendParts(a, groups, count, begin, end, states, later,
              [&](int64_t part, int64_t stop, float* own) {
                const bool last = stop == end;
                few.AttendPart(part, stop, own, for_keys, last ? next : heads, last ? 0 : stop);
              });
}

template <typename Terms>
void AttendRows(const Attention& a, const AttentionHead& head, int64_t first, int64_t count,
                int64_t begin, int64_t end, float* scratch, float* states) {
  if (count <= kMostFewRows) {
    AttendGroups<Terms>(a, &head, 1, nullptr, first, count, begin, end, scratch, states);
    return;
  }
  AttendHead<Terms>(a, head, first, count, begin, end, scratch, KeysInScratch(a, scratch), states);
}

void StoreRows(const Attention& a, const AttentionHead& head, int64_t first, int64_t count,
               float* scratch, float* states) {
  for (int64_t r = 0; r < count; ++r) {
    const int64_t lane = r % kBlockLanes;
    const AttentionState state(states + r / kBlockLanes * AttentionStateSize(a.value_depth));
    if (lane == 0) {
      alignas(Isa::kBytes) float factors[kBlockLanes];
      for (int64_t i = 0; i < kBlockLanes; i += kLanes) {
        // Without keys the sums are 0. If all keys are excluded, the result is no number.
        const Floats one = Splat(1.0f);
        const Floats total = Format<kFloat32>::Load((const char*)(state.total + i));
        Format<kFloat32>::Store((char*)(factors + i), a.keys == 0 ? one : one / total);
      }
      ScaleSums<2>(a.value_depth, factors, state.sums);
    }
    for (int64_t i = 0; i < a.value_depth; ++i) scratch[i] = state.sums[i * kBlockLanes + lane];
    const int64_t row = first + r;
    const int64_t at = row / a.queries * a.target_head + row % a.queries * a.target_stride;
    char* const to = head.target + at * AttentionSize(a.target_type);
    if (a.target_type == kFloat16) {
      Narrow<kFloat16>(to, scratch, a.value_depth);
    } else if (a.target_type == kBFloat16) {
      Narrow<kBFloat16>(to, scratch, a.value_depth);
    } else {
      __builtin_memcpy(to, scratch, a.value_depth * sizeof(float));
    }
  }
}

template <typename Terms>
constexpr AttentionKernels MakeAttentionKernels() {
  return {kBlockLanes,        kGroupBlocks * kBlockLanes,
          ClassifyBias,       AttendRows<Terms>,
          AddAttention,       StoreRows,
          kMostGroups,        kMostFewRows,
          AttendGroups<Terms>};
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_ATTENTION_H_
