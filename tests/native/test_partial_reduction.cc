/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_partial_reduction.cc
 * \brief Reductions in two parts, of every type and kind and instruction set: with one group the
 *        bits are those of the reduction, with several those of a reference, element by element.
 */
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "expect.h"
#include "partial_reference.h"
#include "shm/reduce_in_groups_round_once.h"

namespace tvm_ipc {
namespace {

const ElementType kTypes[] = {{2, 16}, {4, 16}, {2, 32}, {2, 64}, {0, 8},  {1, 8}, {0, 16},
                              {1, 16}, {0, 32}, {1, 32}, {0, 64}, {1, 64}, {6, 8}};

/*! \brief Bits of all kinds, with NaN, infinities, and numbers whose sums are rounded. */
uint64_t Draw(ElementType t, std::mt19937_64* random) {
  const uint64_t all = t.bits == 64 ? ~0ull : (1ull << t.bits) - 1;
  const uint64_t bits = (*random)() & all;
  if (t.code == reference::kBool) return bits & 1;
  if (!reference::IsFloating(t) || (*random)() % 4 == 0) return bits;
  const int mantissa = reference::Mantissa(t);
  const uint64_t one = reference::Infinity(t) / 2 >> mantissa << mantissa;
  return (bits & reference::SignBit(t)) | (one + (bits & ((4ull << mantissa) - 1)));
}

/*! \brief Return whether equal powers of two, the last possibly less, form the tree of all. */
bool IsSubtrees(const std::vector<int>& groups) {
  const int first = groups[0];
  bool same = (first & (first - 1)) == 0 && groups.back() <= first;
  for (size_t i = 0; i + 1 < groups.size(); ++i) same = same && groups[i] == first;
  return same;
}

void TestOne(ElementType t, ReduceKind kind, const std::vector<int>& groups, size_t count) {
  std::mt19937_64 random(count * 31 + groups.size());
  const size_t width = t.bytes();
  int n = 0;
  for (int group : groups) n += group;
  std::vector<std::vector<uint8_t>> sources(n, std::vector<uint8_t>(count * width));
  for (auto& source : sources) {
    for (size_t i = 0; i < count; ++i) {
      const uint64_t bits = Draw(t, &random);
      memcpy(source.data() + i * width, &bits, width);
    }
  }
  const Partial partial("test", t, kind);
  std::vector<const void*> all;
  for (const auto& source : sources) all.push_back(source.data());
  std::vector<std::vector<uint8_t>> partials;
  std::vector<const void*> folded;
  const void* const* next = all.data();
  for (int group : groups) {
    partials.emplace_back(count * partial.width());
    partial.Fold(partials.back().data(), next, group, count);
    folded.push_back(partials.back().data());
    next += group;
  }
  std::vector<uint8_t> result(count * width), whole(count * width);
  partial.Finish(result.data(), folded.data(), static_cast<int>(groups.size()), count, n);
  const std::string what = Text(Name(kind), " of ", Name(t), " with ", InstructionSet());
  if (groups.size() == 1) {
    RequireReduce("test", t, kind)(whole.data(), all.data(), n, count, false);
    EXPECT(result == whole, what, " differs from the reduction");
  }
  if (kind == ReduceKind::kTreeSum && IsSubtrees(groups)) {
    // An invalid operation in one group hides a NaN of a later one, so the payload may differ.
    RequireReduce("test", t, kind)(whole.data(), all.data(), n, count, false);
    for (size_t i = 0; i < count; ++i) {
      uint64_t found = 0, wanted = 0;
      memcpy(&found, result.data() + i * width, width);
      memcpy(&wanted, whole.data() + i * width, width);
      const bool nan = reference::IsFloating(t) && reference::IsNan(t, wanted);
      EXPECT(nan ? reference::IsNan(t, found) : found == wanted, what, ": element ", i, " is ",
             found, ", not ", wanted, " as without groups");
    }
  }
  std::vector<uint64_t> x(n);
  for (size_t i = 0; i < count; ++i) {
    for (int k = 0; k < n; ++k) memcpy(&x[k], sources[k].data() + i * width, width);
    uint64_t found = 0;
    memcpy(&found, result.data() + i * width, width);
    const uint64_t expected = reference::ReduceInGroups(t, kind, x.data(), groups);
    EXPECT(found == expected, what, ": element ", i, " is ", found, ", not ", expected);
  }
}

}  // namespace
}  // namespace tvm_ipc

int main() {
  using namespace tvm_ipc;
  for (const char* set : {"portable", "avx2", "avx512", "avx512bf16"}) {
    if (!UseInstructionSet(set)) continue;
    for (const ElementType type : kTypes) {
      for (int kind = 0; kind < kNumReduceKinds; ++kind) {
        if (FindReduce(type, static_cast<ReduceKind>(kind)) == nullptr) continue;
        for (const auto& groups : std::vector<std::vector<int>>{
                 {1}, {3}, {1, 1}, {2, 3, 1, 1}, {4, 4, 4, 3}, {2, 2, 2}}) {
          for (size_t count : {0, 1, 31, 33, 1500, 4500}) {
            TestOne(type, static_cast<ReduceKind>(kind), groups, count);
          }
        }
      }
    }
  }
  std::printf("passed\n");
  return 0;
}
