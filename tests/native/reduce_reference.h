/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_reference.h
 * \brief What a reduction must give, one element at a time, with nothing from reduce_*.h: halves
 *        go through the library's ldexp and nearbyint, integers through 128 bits.
 */
#ifndef TVM_IPC_TESTS_REDUCE_REFERENCE_H_
#define TVM_IPC_TESTS_REDUCE_REFERENCE_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "shm/select_kernels_by_instruction_set.h"

namespace reference {

using tvm_ipc::ElementType;
using tvm_ipc::ReduceKind;

constexpr int kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kBool = 6;

template <typename To, typename From>
To As(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline bool IsFloating(ElementType t) { return t.code == kFloat || t.code == kBFloat; }

/*! \brief Number of mantissa bits. */
inline int Mantissa(ElementType t) {
  if (t.code == kBFloat) return 7;
  return t.bits == 16 ? 10 : t.bits == 32 ? 23 : 52;
}

inline uint64_t SignBit(ElementType t) { return 1ull << (t.bits - 1); }
inline uint64_t Infinity(ElementType t) { return SignBit(t) - (1ull << Mantissa(t)); }
inline uint64_t QuietBit(ElementType t) { return 1ull << (Mantissa(t) - 1); }
inline bool IsNan(ElementType t, uint64_t bits) { return (bits & ~SignBit(t)) > Infinity(t); }

/*! \brief The value of a float that is not NaN. */
inline double Value(ElementType t, uint64_t bits) {
  if (t.bits == 64) return As<double>(bits);
  if (t.bits == 32) return As<float>(static_cast<uint32_t>(bits));
  if (t.code == kBFloat) return As<float>(static_cast<uint32_t>(bits << 16));
  int exponent = static_cast<int>(bits >> 10) & 31;
  double fraction = static_cast<double>(bits & 1023);
  double magnitude = exponent == 31  ? HUGE_VAL
                     : exponent == 0 ? std::ldexp(fraction, -24)
                                     : std::ldexp(fraction + 1024, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

/*! \brief The 16-bit float next to a float32 that is not NaN, ties to even. */
inline uint64_t Round16(ElementType t, float value) {
  int mantissa = Mantissa(t);
  int least = t.code == kBFloat ? -126 : -14;  // exponent of the smallest normal number
  int largest = t.code == kBFloat ? 127 : 15;
  uint64_t sign = std::signbit(value) ? SignBit(t) : 0;
  double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(magnitude)) return sign | Infinity(t);
  int exponent = magnitude == 0 ? least : std::ilogb(magnitude);
  if (exponent < least) exponent = least;
  // In units of the last place, an integer that nearbyint rounds to even.
  double units = std::nearbyint(std::ldexp(magnitude, mantissa - exponent));
  if (units >= std::ldexp(1.0, mantissa + 1)) {
    units /= 2;
    exponent += 1;
  }
  if (exponent > largest) return sign | Infinity(t);
  uint64_t integer = static_cast<uint64_t>(units);
  uint64_t one = 1ull << mantissa;
  if (integer < one) return sign | integer;
  return sign | static_cast<uint64_t>(exponent - least + 1) << mantissa | (integer - one);
}

/*! \brief The sum of n numbers as a tree, split at the largest power of two below n. */
template <typename T>
T TreeSum(const T* x, int n) {
  if (n == 1) return x[0];
  int left = 1;
  while (left * 2 < n) left *= 2;
  return TreeSum(x, left) + TreeSum(x + left, n - left);
}

template <typename T>
T Fold(ReduceKind kind, const T* x, int n) {
  if (kind == ReduceKind::kTreeSum) return TreeSum(x, n);
  T acc = x[0];
  for (int k = 1; k < n; ++k) {
    if (kind == ReduceKind::kSum || kind == ReduceKind::kAvg) {
      acc = acc + x[k];
    } else if (kind == ReduceKind::kProd) {
      acc = acc * x[k];
    } else if (kind == ReduceKind::kMin) {
      if (x[k] < acc) acc = x[k];
    } else if (x[k] > acc) {
      acc = x[k];
    }
  }
  return kind == ReduceKind::kAvg ? acc / static_cast<T>(n) : acc;
}

inline uint64_t Floating(ElementType t, ReduceKind kind, const uint64_t* x, int n) {
  for (int k = 0; k < n; ++k) {
    if (IsNan(t, x[k])) return x[k] | QuietBit(t);
  }
  uint64_t none = Infinity(t) | QuietBit(t);
  if (t.bits == 64) {
    double v[64];
    for (int k = 0; k < n; ++k) v[k] = Value(t, x[k]);
    double r = Fold(kind, v, n);
    return std::isnan(r) ? none : As<uint64_t>(r);
  }
  float v[64];
  for (int k = 0; k < n; ++k) v[k] = static_cast<float>(Value(t, x[k]));
  float r = Fold(kind, v, n);
  if (std::isnan(r)) return none;
  return t.bits == 32 ? As<uint32_t>(r) : Round16(t, r);
}

inline uint64_t Integer(ElementType t, ReduceKind kind, const uint64_t* x, int n) {
  // Unsigned, so that products wrap; comparisons and the division are made signed.
  using Wide = unsigned __int128;
  __extension__ typedef __int128 Signed;
  bool is_signed = t.code == kInt;
  Wide acc = 0;
  for (int k = 0; k < n; ++k) {
    Wide v = x[k];
    if (is_signed && (x[k] & SignBit(t)) != 0) v -= Wide(1) << t.bits;
    Signed a = static_cast<Signed>(acc), b = static_cast<Signed>(v);
    if (k == 0) {
      acc = v;
    } else if (kind == ReduceKind::kSum || kind == ReduceKind::kAvg ||
               kind == ReduceKind::kTreeSum) {
      acc += v;
    } else if (kind == ReduceKind::kProd) {
      acc *= v;
    } else if (kind == ReduceKind::kBand) {
      acc &= v;
    } else if (kind == ReduceKind::kBor) {
      acc |= v;
    } else if (kind == ReduceKind::kBxor) {
      acc ^= v;
    } else if (kind == ReduceKind::kMin ? b < a : b > a) {
      acc = v;
    }
  }
  if (kind == ReduceKind::kAvg) acc = static_cast<Wide>(static_cast<Signed>(acc) / n);
  uint64_t low = static_cast<uint64_t>(acc);
  return t.bits == 64 ? low : low & (SignBit(t) * 2 - 1);
}

/*! \brief The bits of x[0] op ... op x[n - 1]. */
inline uint64_t Reduce(ElementType t, ReduceKind kind, const uint64_t* x, int n) {
  if (IsFloating(t)) return Floating(t, kind, x, n);
  if (t.code != kBool) return Integer(t, kind, x, n);
  bool any = false, all = true;
  for (int k = 0; k < n; ++k) {
    any = any || x[k] != 0;
    all = all && x[k] != 0;
  }
  const bool wants_any =
      kind == ReduceKind::kSum || kind == ReduceKind::kMax || kind == ReduceKind::kTreeSum;
  return wants_any ? any : all;
}

}  // namespace reference
#endif  // TVM_IPC_TESTS_REDUCE_REFERENCE_H_
