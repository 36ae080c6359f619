/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file partial_reference.h
 * \brief What a reduction over several nodes must give, one element at a time: partials in the
 *        groups' order, rounded once.
 */
#ifndef TVM_IPC_TESTS_PARTIAL_REFERENCE_H_
#define TVM_IPC_TESTS_PARTIAL_REFERENCE_H_

#include <vector>

#include "reduce_reference.h"

namespace reference {

/*! \brief The bits of float32 that a 16-bit float is; NaN keeps its payload. */
inline uint64_t Wide(ElementType t, uint64_t bits) {
  const uint64_t sign = (bits & SignBit(t)) << 16;
  if (IsNan(t, bits)) {
    const uint64_t payload = bits & (Infinity(t) ^ (SignBit(t) - 1));
    return sign | 0x7f800000u | payload << (23 - Mantissa(t));
  }
  return As<uint32_t>(static_cast<float>(Value(t, bits)));
}

inline uint64_t FloatsInGroups(ElementType t, ReduceKind kind, const uint64_t* x,
                               const std::vector<int>& groups) {
  const ElementType wide = t.bits == 16 ? ElementType{kFloat, 32, 1} : t;
  const ReduceKind folds = kind == ReduceKind::kAvg ? ReduceKind::kSum : kind;
  std::vector<uint64_t> partials;
  int n = 0;
  for (int group : groups) {
    std::vector<uint64_t> values;
    for (int k = 0; k < group; ++k, ++n) values.push_back(t.bits == 16 ? Wide(t, x[n]) : x[n]);
    partials.push_back(Floating(wide, folds, values.data(), group));
  }
  uint64_t sum = Floating(wide, folds, partials.data(), static_cast<int>(partials.size()));
  const bool nan = IsNan(wide, sum);
  if (kind == ReduceKind::kAvg && !nan) {
    sum = t.bits == 64
              ? As<uint64_t>(As<double>(sum) / n)
              : As<uint32_t>(As<float>(static_cast<uint32_t>(sum)) / static_cast<float>(n));
  }
  if (t.bits != 16) return sum;
  if (!nan) return Round16(t, As<float>(static_cast<uint32_t>(sum)));
  const uint64_t payload = (sum & 0x7fffffu) >> (23 - Mantissa(t));
  return (sum >> 16 & SignBit(t)) | Infinity(t) | QuietBit(t) | payload;
}

/*! \brief The bits of the partials' reduction; what does not round has them in any order. */
inline uint64_t ReduceInGroups(ElementType t, ReduceKind kind, const uint64_t* x,
                               const std::vector<int>& groups) {
  if (IsFloating(t)) return FloatsInGroups(t, kind, x, groups);
  int n = 0;
  for (int group : groups) n += group;
  return Reduce(t, kind, x, n);
}

}  // namespace reference
#endif  // TVM_IPC_TESTS_PARTIAL_REFERENCE_H_
