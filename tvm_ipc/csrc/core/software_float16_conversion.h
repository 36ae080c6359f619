/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file software_float16_conversion.h
 * \brief Conversion between float16 and float32 without F16C, for one lane or a vector of them.
 *
 * The results have the same bits as those of the F16C instructions for everything but NaN. Callers
 * handle NaN separately (for example reduce_impl.h).
 */
#ifndef TVM_IPC_CORE_SOFTWARE_FLOAT16_CONVERSION_H_
#define TVM_IPC_CORE_SOFTWARE_FLOAT16_CONVERSION_H_

#include <cstddef>
#include <cstdint>

namespace tvm_ipc {
namespace {

template <typename To, typename From>
inline To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// Bits and Int are the unsigned and signed integers as wide as Float: one lane, or a vector of
// them. Comparisons are signed because SSE2 has no others; magnitudes have no sign bit.

/*! \brief Convert the half in the low 16 bits of each lane to float32; the upper bits are zero. */
template <typename Float, typename Int, typename Bits>
inline Float SoftWidenHalf(Bits half) {
  Bits magnitude = half & 0x7fffu;
  Bits normal = (magnitude << 13) + (112u << 23);  // adjusts the exponent bias
  Bits infinite = (magnitude << 13) + (224u << 23);
  // A subnormal counts units of 2^-24, which is one unit in the last place of 0.5. The
  // difference is exact and never sees a float32 subnormal, so flush-to-zero does not matter.
  Bits tiny = BitCast<Bits>(BitCast<Float>(magnitude | 0x3f000000u) - 0.5f);
  Int order = BitCast<Int>(magnitude);
  Bits bits = order < 0x0400 ? tiny : (order < 0x7c00 ? normal : infinite);
  return BitCast<Float>(bits | ((half & 0x8000u) << 16));
}

/*! \brief Convert to half, rounded to nearest even, in the low 16 bits of each lane. */
template <typename Float, typename Int, typename Bits>
inline Bits SoftNarrowHalf(Float value) {
  Bits all = BitCast<Bits>(value);
  Bits magnitude = all & 0x7fffffffu;
  // A carry out of the mantissa increments the exponent; from the largest it gives infinity.
  Bits odd = (magnitude >> 13) & 1u;
  Bits normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
  // The addition rounds to units of 2^-24.
  Bits tiny = BitCast<Bits>(BitCast<Float>(magnitude) + 0.5f) - 0x3f000000u;
  Bits infinite = (magnitude & 0u) + 0x7c00u;
  Int order = BitCast<Int>(magnitude);
  Bits bits = order < 0x38800000 ? tiny : (order < 0x47800000 ? normal : infinite);
  return bits | ((all >> 16) & 0x8000u);
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_SOFTWARE_FLOAT16_CONVERSION_H_
