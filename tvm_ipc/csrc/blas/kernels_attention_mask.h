/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_attention_mask.h
 * \brief Which keys the bias and the causal mask of attention exclude; part of
 *        kernel_table_of_instruction_set.h.
 *
 * A bias is read once for each query, by ClassifyBias, before the blocks of rows are computed. Most
 * biases are masks: 0 for the keys from one to another, and excluded elsewhere. For these, blocks
 * compare numbers of keys with both ends, and do not read the bias again.
 */
#ifndef TVM_IPC_BLAS_KERNELS_ATTENTION_MASK_H_
#define TVM_IPC_BLAS_KERNELS_ATTENTION_MASK_H_

#include "blas/kernels_float_conversion.h"

namespace tvm_ipc {
namespace {

/*! \brief Rows of a block: two vectors. */
constexpr int64_t kBlockLanes = 2 * kLanes;
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kGreatest = 3.4028234663852886e38f;
/*! \brief Up to this a bias excludes its key: no score that is a number can outweigh it. */
constexpr float kExcluded = -3e38f;

inline void WidenAny(FloatType type, float* to, const char* from, int64_t count) {
  if (type == kFloat16) {
    Widen<kFloat16>(to, from, count);
  } else if (type == kBFloat16) {
    Widen<kBFloat16>(to, from, count);
  } else {
    Widen<kFloat32>(to, from, count);
  }
}

inline int64_t AttentionSize(FloatType type) { return type == kFloat32 ? 4 : 2; }

inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Greater(int64_t a, int64_t b) { return a > b ? a : b; }

/*! \brief Return the bias of a row for some keys; `values` has room for them. */
inline const float* ReadBias(const Attention& a, const char* row, int64_t begin, int64_t count,
                             float* values) {
  const char* from = row + begin * a.bias_key * AttentionSize(a.bias_type);
  if (a.bias_key == 1 && a.bias_type == kFloat32) return (const float*)from;
  if (a.bias_key == 1) {
    WidenAny(a.bias_type, values, from, count);
  } else {
    WidenAny(a.bias_type, values, from, 1);
    for (int64_t t = 1; t < count; ++t) values[t] = values[0];
  }
  return values;
}

inline bool AnyLane(Ints lanes) {
  uint64_t words[Isa::kBytes / 8], any = 0;
  __builtin_memcpy(words, &lanes, sizeof(words));
  for (uint64_t word : words) any |= word;
  return any != 0;
}

/*! \brief Classify the bias of one block, up to kAttentionKeys keys. */
inline BiasRange ClassifyBlock(const float* values, int64_t count) {
  if (count == kAttentionKeys) {
    Ints nonzero = {}, opened = {};
    for (int64_t t = 0; t < kAttentionKeys; t += kLanes) {
      const Floats bias = Format<kFloat32>::Load((const char*)(values + t));
      nonzero |= (Ints)(bias != (Floats){});
      opened |= ~(Ints)(bias <= Splat(kExcluded));
    }
    if (!AnyLane(nonzero)) return {0, kAttentionKeys, true};
    if (!AnyLane(opened)) return {0, 0, true};
  }
  int first = kAttentionKeys, last = 0, open = 0, plain = 1;
  for (int t = 0; t < count; ++t) {
    if (values[t] <= kExcluded) continue;
    ++open;
    plain &= values[t] == 0;
    if (t < first) first = t;
    last = t + 1;
  }
  if (open == 0) return {0, 0, true};
  return {static_cast<uint8_t>(first), static_cast<uint8_t>(last), plain && open == last - first};
}

void ClassifyBias(const Attention& a, const char* row, BiasRange* ranges) {
  float values[kAttentionKeys];
  for (int64_t key = 0; key < a.keys; key += kAttentionKeys) {
    const int64_t count = Smaller(a.keys - key, kAttentionKeys);
    *ranges++ = ClassifyBlock(ReadBias(a, row, key, count, values), count);
  }
}

/*! \brief Rows that are computed together, with the bias of each, and its range of keys. */
struct AttentionRows {
  int64_t count;
  const char* bias[kBlockLanes];
  const BiasRange* ranges[kBlockLanes];
  int64_t begin[kBlockLanes], end[kBlockLanes];
  /*! \brief Without a bias: the keys that all rows see. */
  int64_t all_begin, all_end;
  /*! \brief Whether some row sees no key, so that the bias weighs keys that it excludes. */
  bool lonely;

  /*! \brief Set the rows [first, first + number). */
  void Set(const Attention& a, const AttentionHead& head, int64_t first, int64_t number) {
    count = number;
    all_begin = 0;
    all_end = head.bias == nullptr ? a.keys : 0;
    lonely = false;
    for (int64_t r = 0; r < kBlockLanes; ++r) {
      const int64_t row = first + (r < count ? r : 0), of_head = row / a.queries;
      const int64_t query = row % a.queries, seen = query + a.offset + 1;
      begin[r] = a.window > 0 ? Greater(seen - a.window, 0) : 0;
      end[r] = a.causal ? Smaller(seen, a.keys) : a.keys;
      bias[r] = nullptr;
      all_begin = Greater(all_begin, begin[r]);
      all_end = Smaller(all_end, end[r]);
      if (head.bias == nullptr) continue;
      bias[r] =
          head.bias + (of_head * a.bias_head + query * a.bias_query) * AttentionSize(a.bias_type);
      ranges[r] = head.ranges + of_head * a.range_head + query * a.range_query;
      lonely = lonely || !HasKey(a, r);
    }
  }

 private:
  bool HasKey(const Attention& a, int64_t r) const {
    for (int64_t key = 0; key < a.keys; key += kAttentionKeys) {
      const BiasRange range = ranges[r][key / kAttentionKeys];
      if (Greater(key + range.begin, begin[r]) < Smaller(key + range.end, end[r])) return true;
    }
    return false;
  }
};

/*! \brief The keys of a block that each row sees. */
struct BlockMask {
  /*! \brief The number of keys up to the last one that some row sees. */
  int64_t count = 0;
  /*! \brief The keys that all rows see. */
  int64_t all_begin = 0, all_end = kAttentionKeys;
  /*! \brief Whether the bias must be added, because its values are not only 0 and excluded. */
  bool add_bias = false;
  alignas(Isa::kBytes) int32_t begin[kBlockLanes], end[kBlockLanes];

  BlockMask() = default;
  BlockMask(const AttentionRows& rows, int64_t key, int64_t keys) {
    if (key >= rows.all_begin && key + keys <= rows.all_end) {
      count = keys;
      return;
    }
    const int64_t block = key / kAttentionKeys;
    for (int64_t r = 0; r < kBlockLanes; ++r) {
      int64_t from = Greater(rows.begin[r] - key, 0), to = Smaller(rows.end[r] - key, keys);
      if (rows.bias[r] != nullptr) {
        const BiasRange range = rows.ranges[r][block];
        add_bias = add_bias || !range.plain || rows.lonely;
        if (!rows.lonely) {
          from = Greater(from, range.begin);
          to = Smaller(to, range.end);
        }
      }
      if (from >= to) from = to = 0;
      begin[r] = static_cast<int32_t>(from);
      end[r] = static_cast<int32_t>(to);
      count = Greater(count, to);
      all_begin = Greater(all_begin, from);
      all_end = Smaller(all_end, to);
    }
  }

  /*! \brief Add the bias to the scores, which are in units of the logarithm to base 2, and exclude
   *         keys outside of the rows' ranges. */
  template <int kVectors>
  void Apply(const Attention& a, const AttentionRows& rows, int64_t key, float* scores) const {
    if (add_bias) AddBias(a, rows, key, scores, kBlockLanes, 1);
    const Floats excluded = Splat(-__builtin_inff());
    for (int64_t t = 0; t < count; ++t) {
      if (t >= all_begin && t < all_end) continue;
      for (int v = 0; v < kVectors; ++v) {
        Ints from, to;
        __builtin_memcpy(&from, begin + v * kLanes, sizeof(from));
        __builtin_memcpy(&to, end + v * kLanes, sizeof(to));
        const Ints at = static_cast<int32_t>(t) - (Ints){};
        char* p = (char*)(scores + t * kBlockLanes + v * kLanes);
        const Ints open = (at >= from) & (at < to);
        const Floats score = Format<kFloat32>::Load(p);
        Format<kFloat32>::Store(p, open ? score : excluded);
      }
    }
  }

  /*! \brief The same for scores whose rows have kAttentionKeys elements; all of these are written.
   */
  void ApplyToRows(const Attention& a, const AttentionRows& rows, int64_t key,
                   float* scores) const {
    if (add_bias) AddBias(a, rows, key, scores, 1, kAttentionKeys);
    const bool open = all_begin <= 0 && all_end >= count;
    if (open && count == kAttentionKeys) return;
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t from = open ? 0 : begin[r], to = open ? count : end[r];
      float* row = scores + r * kAttentionKeys;
      for (int64_t t = 0; t < from; ++t) row[t] = -__builtin_inff();
      for (int64_t t = to; t < kAttentionKeys; ++t) row[t] = -__builtin_inff();
    }
  }

 private:
  void AddBias(const Attention& a, const AttentionRows& rows, int64_t key, float* scores,
               int64_t next_key, int64_t next_row) const {
    float memory[kAttentionKeys];
    for (int64_t r = 0; r < rows.count; ++r) {
      const float* values = ReadBias(a, rows.bias[r], key, count, memory);
      for (int64_t t = 0; t < count; ++t) {
        float bias = values[t] * kLog2E;
        // The smallest number stays a number: it is the bias of all keys where a row sees none.
        if (bias < -kGreatest && values[t] >= -kGreatest) bias = -kGreatest;
        scores[t * next_key + r * next_row] += bias;
      }
    }
  }
};

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_ATTENTION_MASK_H_
