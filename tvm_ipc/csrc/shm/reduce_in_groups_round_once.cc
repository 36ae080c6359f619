/* SPDX-License-Identifier: Apache-2.0 */
/*! \file reduce_in_groups_round_once.cc */
#include "shm/reduce_in_groups_round_once.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/shared_memory_layout.h"
#include "shm/find_norm_function.h"

namespace tvm_ipc {

namespace {

__extension__ typedef __int128 TwoWords;
__extension__ typedef unsigned __int128 UnsignedTwoWords;

constexpr uint8_t kIntCode = 0, kFloatCode = 2, kBFloatCode = 4;  // codes of DLPack
constexpr ElementType kFloat32{kFloatCode, 32, 1};
/*! \brief The number of floats of a block on the stack, which stays in the caches. */
constexpr size_t kBlockFloats = 4096;

const void* At(const void* data, size_t bytes) { return static_cast<const char*>(data) + bytes; }
void* At(void* data, size_t bytes) { return static_cast<char*>(data) + bytes; }

/*! \brief Add integers for an average, in sums that do not wrap. The division follows later. */
template <typename T, typename Sum>
void FoldIntegers(void* dst, const void* const* sources, int num_sources, size_t count) {
  constexpr size_t kBlock = 256;
  Sum sums[kBlock];
  T values[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    std::fill_n(sums, n, Sum{0});
    for (int k = 0; k < num_sources; ++k) {
      memcpy(values, At(sources[k], at * sizeof(T)), n * sizeof(T));
      for (size_t i = 0; i < n; ++i) sums[i] += static_cast<Sum>(values[i]);
    }
    memcpy(At(dst, at * sizeof(Sum)), sums, n * sizeof(Sum));
  }
}

template <typename T, typename Sum>
void FinishIntegers(void* dst, const void* const* partials, int num_partials, size_t count,
                    int num_sources) {
  constexpr size_t kBlock = 256;
  Sum sums[kBlock], more[kBlock];
  T values[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    std::fill_n(sums, n, Sum{0});
    for (int k = 0; k < num_partials; ++k) {
      memcpy(more, At(partials[k], at * sizeof(Sum)), n * sizeof(Sum));
      for (size_t i = 0; i < n; ++i) sums[i] += more[i];
    }
    for (size_t i = 0; i < n; ++i) values[i] = static_cast<T>(sums[i] / num_sources);
    memcpy(At(dst, at * sizeof(T)), values, n * sizeof(T));
  }
}

/*! \brief Call `call` with values of the integer type and of the type of its sums. */
template <typename Call>
void OfInteger(ElementType type, Call call) {
  const bool is_signed = type.code == kIntCode;
  switch (type.bits) {
    case 8:
      return is_signed ? call(int8_t{}, int64_t{}) : call(uint8_t{}, int64_t{});
    case 16:
      return is_signed ? call(int16_t{}, int64_t{}) : call(uint16_t{}, int64_t{});
    case 32:
      return is_signed ? call(int32_t{}, int64_t{}) : call(uint32_t{}, int64_t{});
    default:
      return is_signed ? call(int64_t{}, TwoWords{}) : call(uint64_t{}, UnsignedTwoWords{});
  }
}

template <typename T>
void DivideAll(void* data, size_t count, int divisor) {
  constexpr size_t kBlock = 256;
  T values[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    memcpy(values, At(data, at * sizeof(T)), n * sizeof(T));
    for (size_t i = 0; i < n; ++i) values[i] /= static_cast<T>(divisor);
    memcpy(At(data, at * sizeof(T)), values, n * sizeof(T));
  }
}

}  // namespace

Partial::Partial(const char* operation, ElementType type, ReduceKind kind)
    : type_(type), kind_(kind), representation_(Representation::kSame), width_(type.bytes()) {
  RequireReduce(operation, type, kind);  // throws if there is none
  const bool floats = type.code == kFloatCode || type.code == kBFloatCode;
  const bool average = kind == ReduceKind::kAvg;
  const bool chooses = kind == ReduceKind::kMin || kind == ReduceKind::kMax;
  const ReduceKind folds = average ? ReduceKind::kSum : kind;
  if (floats && type.bits == 16 && !chooses) {
    representation_ = Representation::kFloat;
    width_ = sizeof(float);
    widen_ = RequireWiden(operation, type);
    narrow_ = RequireNarrow(operation, type);
    reduce_ = RequireReduce(operation, kFloat32, folds);
  } else if (!floats && average) {
    representation_ = type.bits == 64 ? Representation::kTwoWords : Representation::kWord;
    width_ = type.bits == 64 ? sizeof(TwoWords) : sizeof(int64_t);
  } else {
    reduce_ = RequireReduce(operation, type, folds);
  }
}

void Partial::Fold(void* dst, const void* const* sources, int num_sources, size_t count) const {
  if (representation_ == Representation::kSame)
    return reduce_(dst, sources, num_sources, count, false);
  if (representation_ != Representation::kFloat) {
    return OfInteger(type_, [&](auto value, auto sum) {
      FoldIntegers<decltype(value), decltype(sum)>(dst, sources, num_sources, count);
    });
  }
  alignas(kLine) float wide[kBlockFloats];
  const void* here[kMaxRanks];
  const size_t most = kBlockFloats / static_cast<size_t>(num_sources) / 16 * 16;
  for (size_t at = 0; at < count; at += most) {
    const size_t n = std::min(most, count - at);
    for (int k = 0; k < num_sources; ++k) {
      float* to = wide + static_cast<size_t>(k) * most;
      widen_(to, At(sources[k], at * type_.bytes()), n);
      here[k] = to;
    }
    reduce_(At(dst, at * sizeof(float)), here, num_sources, n, false);
  }
}

void Partial::Finish(void* dst, const void* const* partials, int num_partials, size_t count,
                     int num_sources) const {
  if (representation_ == Representation::kFloat)
    return FinishFloats(dst, partials, num_partials, count, num_sources);
  if (representation_ != Representation::kSame) {
    return OfInteger(type_, [&](auto value, auto sum) {
      FinishIntegers<decltype(value), decltype(sum)>(dst, partials, num_partials, count,
                                                     num_sources);
    });
  }
  reduce_(dst, partials, num_partials, count, false);
  if (kind_ == ReduceKind::kAvg) Divide(dst, count, num_sources);
}

void Partial::FinishFloats(void* dst, const void* const* partials, int num_partials, size_t count,
                           int num_sources) const {
  alignas(kLine) float sums[kBlockFloats];
  const void* here[kMaxRanks];
  for (size_t at = 0; at < count; at += kBlockFloats) {
    const size_t n = std::min(kBlockFloats, count - at);
    for (int k = 0; k < num_partials; ++k) here[k] = At(partials[k], at * sizeof(float));
    reduce_(sums, here, num_partials, n, false);
    if (kind_ == ReduceKind::kAvg) DivideAll<float>(sums, n, num_sources);
    narrow_(At(dst, at * type_.bytes()), sums, n);
  }
}

void Partial::Divide(void* dst, size_t count, int num_sources) const {
  if (type_.bits == 64) return DivideAll<double>(dst, count, num_sources);
  DivideAll<float>(dst, count, num_sources);
}

}  // namespace tvm_ipc
