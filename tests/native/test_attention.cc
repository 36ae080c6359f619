/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_attention.cc
 * \brief Attention in memory with guards around it against a plain loop in float64: every kernel,
 *        type, mask and group, with tokens before or after heads, and the same bits for any number
 *        of threads, of queries and of heads that take turns; with `--threads` several threads
 * alone. For the sanitizers.
 */
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "blas/attention_multi_thread.h"
#include "blas/scratch_memory.h"
#include "blas/select_instruction_set.h"
#include "expect.h"
#include "float_elements.h"
using namespace tvm_ipc;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

int number_of_threads = 1;
int CountThreads() { return number_of_threads; }
constexpr Threads kPool{CountThreads, RunThreads};

enum class Bias { kNone, kCausal, kWindow, kHoles, kRandom, kPerHead };

struct Case {
  FloatType type;
  int64_t batches, groups, heads, queries, keys, depth, value_depth;
  bool tokens_first;
  Bias bias;
  bool causal;
  int64_t window;
  double softcap;
};

/*! \brief The inputs of a case, and the result. */
struct Inputs {
  const Case& c;
  int64_t all_heads;
  Elements queries, keys, values, bias, target;
  AttentionBatch batch{};

  explicit Inputs(const Case& c)
      : c(c),
        all_heads(c.groups * c.heads),
        queries(c.type, c.batches * all_heads * c.queries * c.depth, 1),
        keys(c.type, c.batches * c.groups * c.keys * c.depth, 2),
        values(c.type, c.batches * c.groups * c.keys * c.value_depth, 3),
        bias(kFloat32, BiasHeads() * c.queries * c.keys, 5),
        target(c.type, c.batches * all_heads * c.queries * c.value_depth, 6) {
    const bool is_mask = c.bias == Bias::kCausal || c.bias == Bias::kWindow;
    for (int64_t i = 0; i < c.queries * c.keys; ++i) {
      const int64_t query = i / c.keys, key = i % c.keys, place = query + c.keys - c.queries;
      const bool hidden = key > place || (c.bias == Bias::kWindow && key <= place - 20);
      if (is_mask) SetBias(i, hidden ? -3.4028234663852886e38 : 0);
      // Of the fifth query, all keys are excluded.
      const bool hole = (query * 7 + key * 13) % 5 == 0 || query == 4;
      if (c.bias == Bias::kHoles && hole)
        SetBias(i, query == 4 ? -3.4028234663852886e38 : -kInfinity);
    }
    Attention& a = batch.each;
    a.type = a.target_type = c.type;
    a.bias_type = kFloat32;
    a.queries = c.queries;
    a.keys = c.keys;
    a.depth = c.depth;
    a.value_depth = c.value_depth;
    a.scale = 0.5f;
    a.softcap = static_cast<float>(c.softcap);
    a.causal = c.causal;
    a.offset = c.keys - c.queries;
    a.window = c.window;
    a.bias_head = c.bias == Bias::kPerHead ? c.queries * c.keys : 0;
    a.bias_query = c.keys;
    a.bias_key = 1;
    batch.batches = c.batches;
    batch.groups = c.groups;
    batch.heads = c.heads;
    batch.first = {queries.memory.data(), keys.memory.data(), values.memory.data(),
                   c.bias == Bias::kNone ? nullptr : bias.memory.data(), target.memory.data()};
    SetStrides(all_heads, c.queries, c.depth, c.heads, &batch.queries, &a.query_head,
               &a.query_stride);
    SetStrides(all_heads, c.queries, c.value_depth, c.heads, &batch.target, &a.target_head,
               &a.target_stride);
    int64_t head;
    SetStrides(c.groups, c.keys, c.depth, 1, &batch.keys, &head, &a.key_stride);
    SetStrides(c.groups, c.keys, c.value_depth, 1, &batch.values, &head, &a.value_stride);
    batch.bias = {0, a.bias_head * c.heads};
  }

  int64_t BiasHeads() const { return c.bias == Bias::kPerHead ? all_heads : 1; }
  void SetBias(int64_t i, double value) {
    bias.values[i] = value;
    bias.Set(i, value);
  }
  void SetStrides(int64_t heads, int64_t tokens, int64_t depth, int64_t shared,
                  AttentionStrides* strides, int64_t* head, int64_t* token) const {
    *head = c.tokens_first ? depth : tokens * depth;
    *token = c.tokens_first ? heads * depth : depth;
    *strides = {heads * tokens * depth, shared * *head};
  }
  static int64_t At(const AttentionStrides& strides, int64_t batch, int64_t group, int64_t head,
                    int64_t of_head, int64_t token, int64_t of_token) {
    return batch * strides.batch + group * strides.group + head * of_head + token * of_token;
  }

  /*! \brief Return the result of one query, in float64. */
  std::vector<double> Expected(int64_t b, int64_t g, int64_t h, int64_t i) const {
    const Attention& a = batch.each;
    std::vector<double> scores(c.keys), result(c.value_depth, 0.0);
    double most = -kInfinity, total = 0;
    for (int64_t t = 0; t < c.keys; ++t) {
      const int64_t q = At(batch.queries, b, g, h, a.query_head, i, a.query_stride);
      const int64_t k = At(batch.keys, b, g, 0, 0, t, a.key_stride);
      double score = 0;
      for (int64_t d = 0; d < c.depth; ++d) score += queries.values[q + d] * keys.values[k + d];
      score *= a.scale;
      if (c.softcap > 0) score = std::tanh(score / c.softcap) * c.softcap;
      if (c.bias != Bias::kNone) {
        const int64_t head = c.bias == Bias::kPerHead ? g * c.heads + h : 0;
        score += bias.values[(head * c.queries + i) * c.keys + t];
      }
      const int64_t place = i + a.offset;
      if (c.causal && (t > place || (c.window > 0 && t <= place - c.window))) score = -kInfinity;
      scores[t] = score;
      most = std::fmax(most, score);
    }
    for (double& score : scores) total += score = std::exp(score - most);
    for (int64_t t = 0; t < c.keys; ++t) {
      const int64_t v = At(batch.values, b, g, 0, 0, t, a.value_stride);
      for (int64_t d = 0; d < c.value_depth; ++d) {
        result[d] += scores[t] / total * values.values[v + d];
      }
    }
    return result;
  }
};

void CheckCase(const Case& c) {
  Inputs inputs(c);
  std::vector<char> first;
  for (int threads : {1, 2, 3, 4}) {
    number_of_threads = threads;
    Attend(inputs.batch, kPool);
    if (threads == 1) first = inputs.target.memory;
    EXPECT(inputs.target.memory == first, BlasInstructionSet(), ": other bits on ", threads,
           " threads");
  }
  // bfloat16 has 8 bits of precision, and float16 has 11; weights may be rounded once more.
  const double tolerance = c.type == kFloat32 ? 2e-6 : c.type == kFloat16 ? 2e-3 : 1.2e-2;
  const Attention& a = inputs.batch.each;
  for (int64_t row = 0; row < c.batches * inputs.all_heads * c.queries; ++row) {
    const int64_t i = row % c.queries, head = row / c.queries % inputs.all_heads;
    const int64_t b = row / c.queries / inputs.all_heads;
    const std::vector<double> expected = inputs.Expected(b, head / c.heads, head % c.heads, i);
    const int64_t at = Inputs::At(inputs.batch.target, b, head / c.heads, head % c.heads,
                                  a.target_head, i, a.target_stride);
    for (int64_t d = 0; d < c.value_depth; ++d) {
      const double found = inputs.target.Get(at + d), right = expected[d];
      const bool same = std::isnan(right) ? std::isnan(found) : std::abs(found - right) < tolerance;
      EXPECT(same, BlasInstructionSet(), " type ", static_cast<int>(c.type), ", ", c.queries,
             " of ", c.keys, ", depth ", c.depth, ": ", found, " for ", right, " at ", row, ", ",
             d);
    }
  }
}

/*! \brief Fill a tensor with numbers of all bits, so that sums depend on the order of additions. */
void FillWithRandomNumbers(Elements* tensor, uint32_t seed) {
  const bool half = tensor->type == kFloat16;
  const int64_t size = SizeOf(tensor->type);
  for (size_t i = 0; i < tensor->memory.size() / size; ++i) {
    seed = seed * 1664525u + 1013904223u;
    // Signs, exponents of -3 to 0, and mantissas.
    const uint32_t exponent = (half ? 12 : 124) + ((seed >> 28) & 3), mantissa = seed >> 4;
    const uint32_t bits =
        half ? exponent << 10 | (mantissa & 0x3ff) : exponent << 23 | (mantissa & 0x7fffff);
    const uint32_t sign = seed >> 31, word = bits | sign << (half ? 15 : 31);
    const uint32_t shifted = tensor->type == kBFloat16 ? word >> 16 : word;
    std::memcpy(tensor->memory.data() + i * size, &shifted, size);
  }
}

/*! \brief The last queries alone have the bits that they have beside others; a single one only if
 *         the result must be reproducible. */
void CheckFewerQueries(FloatType type, int64_t keys, int64_t depth, int64_t value_depth, Bias bias,
                       double softcap, bool reproducible) {
  const Case all{type, 1, 2, 3, 70, keys, depth, value_depth, false, bias, true, 0, softcap};
  Inputs inputs(all);
  FillWithRandomNumbers(&inputs.queries, 1);
  FillWithRandomNumbers(&inputs.keys, 2);
  FillWithRandomNumbers(&inputs.values, 3);
  inputs.batch.each.reproducible = reproducible;
  number_of_threads = 1;
  Attend(inputs.batch, kPool);
  const std::vector<char> whole = inputs.target.memory;
  const int64_t size = type == kFloat32 ? 4 : 2;
  for (int64_t count : {1, 2, 5, 40}) {
    if (count == 1 && !reproducible) continue;
    AttentionBatch last = inputs.batch;
    const int64_t skipped = all.queries - count;
    last.each.queries = count;
    last.each.offset += skipped;
    last.first.queries += skipped * last.each.query_stride * size;
    if (bias != Bias::kNone) last.first.bias += skipped * last.each.bias_query * 4;
    last.first.target += skipped * last.each.target_stride * size;
    std::fill(inputs.target.memory.begin(), inputs.target.memory.end(), 0);
    Attend(last, kPool);
    bool same = true;
    for (int64_t head = 0; head < 6; ++head) {
      const int64_t at = (head * all.queries + skipped) * all.value_depth * size;
      const int64_t end = at + count * all.value_depth * size;
      for (int64_t i = at; i < end; ++i) same = same && inputs.target.memory[i] == whole[i];
    }
    EXPECT(same, BlasInstructionSet(), ": other bits of the last ", count, " queries");
  }
}

/*! \brief Heads of keys that take turns with blocks of keys have the bits that they have alone. */
void CheckGroups(FloatType type, int64_t groups, int64_t heads, int64_t keys, Bias bias) {
  const Case c{type, 1, groups, heads, 1, keys, 33, 17, true, bias, false, 0, 0};
  Inputs inputs(c);
  number_of_threads = 1;
  Attend(inputs.batch, kPool);
  const std::vector<char> alone = inputs.target.memory;
  std::fill(inputs.target.memory.begin(), inputs.target.memory.end(), 0);
  const Attention& a = inputs.batch.each;
  const AttentionKernels& kernels = CurrentAttention(type);
  std::vector<BiasRange> ranges((keys + kAttentionKeys - 1) / kAttentionKeys);
  if (bias != Bias::kNone) kernels.classify(a, inputs.batch.first.bias, ranges.data());
  std::vector<AttentionHead> all(groups, inputs.batch.first);
  const int64_t size = SizeOf(type);
  for (int64_t g = 0; g < groups; ++g) {
    all[g].queries += g * inputs.batch.queries.group * size;
    all[g].keys += g * inputs.batch.keys.group * size;
    all[g].values += g * inputs.batch.values.group * size;
    all[g].target += g * inputs.batch.target.group * size;
    all[g].ranges = ranges.data();
  }
  Scratch scratch_memory, state_memory;
  float* const scratch = scratch_memory.Floats(kernels.GroupsScratchSize(a, groups));
  const int64_t state_size = kernels.StateSize(a, std::min(kernels.lanes, heads));
  float* const states = state_memory.Floats(groups * state_size);
  for (int64_t first = 0; first < heads; first += kernels.lanes) {
    const int64_t count = std::min(kernels.lanes, heads - first);
    const AttentionHead* next = first == 0 ? nullptr : all.data();
    kernels.attend_groups(a, all.data(), groups, next, first, count, 0, keys, scratch, states);
    for (int64_t g = 0; g < groups; ++g) {
      kernels.store(a, all[g], first, count, scratch, states + g * state_size);
    }
  }
  EXPECT(inputs.target.memory == alone, BlasInstructionSet(), ": other bits of ", groups,
         " heads of keys for ", heads, " heads that take turns");
}

/*!
 * \brief Rows have the same bits in blocks of 1 to 8 rows, which have kernels of their own, as in a
 *        block of all rows; also if heads of keys are side by side and take turns.
 */
void CheckFewRows(FloatType type, int64_t keys, int64_t depth, int64_t value_depth,
                  bool tokens_first, Bias bias, bool causal, int64_t window, double softcap) {
  const Case c{type,         1,    3,      3,      3,      keys, depth, value_depth,
               tokens_first, bias, causal, window, softcap};
  Inputs inputs(c);
  FillWithRandomNumbers(&inputs.queries, 1);
  FillWithRandomNumbers(&inputs.keys, 2);
  FillWithRandomNumbers(&inputs.values, 3);
  const Attention& a = inputs.batch.each;
  const AttentionKernels& kernels = CurrentAttention(type);
  const int64_t size = SizeOf(type), rows = 9,
                blocks = (keys + kAttentionKeys - 1) / kAttentionKeys;
  std::vector<BiasRange> ranges(blocks * c.queries);
  std::vector<AttentionHead> heads(c.groups, inputs.batch.first);
  Attention with_ranges = a;
  with_ranges.range_query = blocks;
  for (int64_t i = 0; i < c.queries && bias != Bias::kNone; ++i) {
    kernels.classify(a, inputs.batch.first.bias + i * a.bias_query * 4, &ranges[i * blocks]);
  }
  for (int64_t g = 0; g < c.groups; ++g) {
    heads[g].queries += g * inputs.batch.queries.group * size;
    heads[g].keys += g * inputs.batch.keys.group * size;
    heads[g].values += g * inputs.batch.values.group * size;
    heads[g].target += g * inputs.batch.target.group * size;
    heads[g].ranges = ranges.data();
  }
  Scratch scratch_memory, state_memory;
  float* const scratch = scratch_memory.Floats(
      std::max(kernels.ScratchSize(a, rows), kernels.GroupsScratchSize(a, c.groups)));
  float* const states = state_memory.Floats(c.groups * kernels.StateSize(a, rows));
  std::vector<char> together;
  for (int64_t count : {9, 8, 7, 5, 4, 3, 2, 1}) {
    for (bool turns : {false, true}) {
      if (turns && count > kernels.lanes) continue;  // one call of attend_groups
      std::fill(inputs.target.memory.begin(), inputs.target.memory.end(), 0);
      for (int64_t first = 0; first < rows; first += count) {
        const int64_t some = std::min(count, rows - first);
        if (turns) {
          kernels.attend_groups(with_ranges, heads.data(), c.groups, nullptr, first, some, 0, keys,
                                scratch, states);
        }
        for (int64_t g = 0; g < c.groups; ++g) {
          float* const state = states + g * kernels.StateSize(a, some);
          if (!turns) {
            kernels.attend(with_ranges, heads[g], first, some, 0, keys, scratch, state);
          }
          kernels.store(with_ranges, heads[g], first, some, scratch, state);
        }
      }
      if (together.empty()) together = inputs.target.memory;
      EXPECT(inputs.target.memory == together, BlasInstructionSet(), " type ",
             static_cast<int>(type), ": other bits of ", count, " rows with ", keys,
             " keys, depth ", depth, ", turns ", turns);
    }
  }
}

void CheckFewRows(FloatType type) {
  for (int64_t keys : {0, 1, 15, 63, 64, 65, 511, 512, 513, 2048}) {
    for (bool tokens_first : {false, true}) {
      const Bias bias = tokens_first ? Bias::kHoles : Bias::kRandom;
      CheckFewRows(type, keys, 64, 64, tokens_first, Bias::kNone, false, 0, 0);
      CheckFewRows(type, keys, 33, 17, tokens_first, bias, false, 0, 0);
    }
    CheckFewRows(type, keys, 128, 128, true, Bias::kNone, true, 0, 2.5);
    CheckFewRows(type, keys, 20, 40, true, Bias::kNone, true, 70, 0);
    CheckFewRows(type, keys, 7, 1, true, Bias::kCausal, true, 20, 1.5);
    CheckFewRows(type, keys, 96, 80, false, Bias::kWindow, false, 0, 0);
  }
}

/*! \brief Values that are no numbers do not matter to queries in whose block of rows no query
 *         attends to them. */
void CheckHiddenValues(FloatType type) {
  const Case c{type, 1, 1, 1, 33, 51, 32, 32, false, Bias::kNone, true, 0, 0};
  Inputs inputs(c);
  for (int64_t d = 0; d < c.value_depth; ++d) {
    char* const value = inputs.values.memory.data() + (50 * c.value_depth + d) * SizeOf(type);
    std::memset(value, 0xff, SizeOf(type));  // not a number, in all types
  }
  Attend(inputs.batch, kPool);
  for (int64_t i = 0; i < c.queries; ++i) {
    const double found = inputs.target.Get(i * c.value_depth);
    EXPECT(std::isnan(found) == (i == 32), BlasInstructionSet(), " type ", static_cast<int>(type),
           ": ", found, " at query ", i);
  }
}

/*! \brief A query without keys has no number, an infinite score makes none, and values of keys
 *         that a mask excludes do not matter. */
void CheckNumbers() {
  const Case c{kFloat32, 1, 1, 1, 3, 5, 4, 4, false, Bias::kRandom, false, 0, 0};
  Inputs inputs(c);
  for (int64_t t = 0; t < 5; ++t) {
    inputs.SetBias(t, -kInfinity);                    // query 0: no key
    inputs.SetBias(5 + t, t == 2 ? kInfinity : 0.0);  // query 1: an infinite score
    inputs.SetBias(10 + t, t < 2 ? 0.0 : -kInfinity);
  }
  Attend(inputs.batch, kPool);
  for (int64_t d = 0; d < 4; ++d) {
    EXPECT(std::isnan(inputs.target.Get(d)), "a query without keys: ", inputs.target.Get(d));
    EXPECT(std::isnan(inputs.target.Get(4 + d)), "an infinite score: ", inputs.target.Get(4 + d));
    EXPECT(std::isfinite(inputs.target.Get(8 + d)), "two keys: ", inputs.target.Get(8 + d));
  }
  // Finite masks of all keys leave the mean of the values.
  for (int64_t t = 0; t < 5; ++t) inputs.SetBias(t, -3.4028234663852886e38);
  Attend(inputs.batch, kPool);
  for (int64_t d = 0; d < 4; ++d) {
    double mean = 0;
    for (int64_t t = 0; t < 5; ++t) mean += inputs.values.values[t * 4 + d] / 5;
    EXPECT(std::abs(inputs.target.Get(d) - mean) < 1e-6,
           "the mean of all values: ", inputs.target.Get(d), " for ", mean);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool threads = argc > 1 && std::string(argv[1]) == "--threads";
  const std::vector<std::string> names = InstructionSetsHere(threads);
  for (const std::string& name : names) {
    UseBlasInstructionSet(name.c_str());
    for (FloatType type : {kFloat16, kBFloat16, kFloat32}) {
      // Blocks of rows and parts of keys, for several threads.
      CheckCase({type, 1, 2, 4, 70, 150, 64, 64, true, Bias::kCausal, false, 0, 0});
      CheckCase({type, 1, 2, 2, 1, 1100, 64, 64, true, Bias::kNone, false, 0, 0});
      // More heads of keys than one call takes.
      CheckCase({type, 2, 10, 2, 1, 600, 64, 64, true, Bias::kNone, false, 0, 0});
      CheckCase({type, 1, 10, 1, 2, 300, 64, 16, true, Bias::kCausal, false, 0, 0});
      CheckCase({type, 1, 1, 3, 9, 1030, 8, 24, false, Bias::kRandom, false, 0, 0});
      CheckCase({type, 2, 1, 3, 140, 200, 16, 16, true, Bias::kHoles, false, 0, 0});
      if (threads) continue;
      CheckCase({type, 1, 2, 2, 140, 200, 16, 16, true, Bias::kWindow, false, 0, 0});
      CheckCase({type, 1, 2, 2, 140, 200, 16, 16, true, Bias::kHoles, true, 50, 0});
      for (bool tokens_first : {false, true}) {
        for (Bias bias : {Bias::kNone, Bias::kCausal, Bias::kRandom, Bias::kPerHead}) {
          CheckCase({type, 2, 2, 3, 7, 70, 5, 3, tokens_first, bias, false, 0, 0});
          CheckCase({type, 1, 3, 1, 1, 64, 16, 33, tokens_first, bias, false, 0, 2.5});
        }
        CheckCase({type, 1, 2, 2, 75, 229, 96, 80, tokens_first, Bias::kHoles, true, 0, 0});
        CheckCase({type, 2, 1, 2, 37, 130, 20, 16, tokens_first, Bias::kNone, true, 0, 0});
        CheckCase({type, 1, 2, 2, 130, 130, 32, 32, tokens_first, Bias::kNone, true, 20, 1.5});
        CheckCase({type, 1, 2, 2, 40, 90, 7, 9, tokens_first, Bias::kRandom, true, 65, 0});
      }
      CheckCase({type, 1, 1, 1, 3, 1, 1, 1, false, Bias::kNone, false, 0, 0});
      CheckCase({type, 1, 2, 2, 0, 3, 4, 4, false, Bias::kNone, false, 0, 0});
      CheckCase({type, 1, 1, 2, 2, 0, 4, 4, false, Bias::kNone, false, 0, 0});
      CheckCase({type, 0, 1, 2, 2, 3, 4, 4, false, Bias::kNone, false, 0, 0});
      CheckFewRows(type);
      CheckHiddenValues(type);
      for (Bias bias : {Bias::kNone, Bias::kRandom, Bias::kHoles}) {
        for (bool reproducible : {false, true}) {
          CheckFewerQueries(type, 70, 33, 17, bias, 0, reproducible);
          CheckFewerQueries(type, 1200, 64, 64, bias, 1.5, reproducible);
        }
        CheckGroups(type, 8, 2, 600, bias);
        CheckGroups(type, 1, 1, 1100, bias);
        CheckGroups(type, 3, 4, 1, bias);
        CheckGroups(type, 2, 40, 130, bias);
      }
    }
    CheckNumbers();
  }
  std::printf("%zu kinds of kernels\n", names.size());
  return names.empty();
}
