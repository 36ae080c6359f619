/* SPDX-License-Identifier: Apache-2.0 */
/*! \file reduce.cc */
#include <algorithm>
#include <cmath>
#include <cstring>

#include "communicator.h"

namespace nccl_double {

namespace {

enum How { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

template <typename T>
T Combine(int how, T a, T b) {
  switch (how) {
    case kProd:
      return static_cast<T>(a * b);
    case kMax:
      return std::max(a, b);
    case kMin:
      return std::min(a, b);
    default:
      return static_cast<T>(a + b);
  }
}

/*! \brief `Wide` is what it computes in: unsigned for integers, which wrap. */
template <typename T, typename Wide>
void Fold(int how, const std::vector<const unsigned char*>& sources, size_t count,
          unsigned char* to) {
  for (size_t i = 0; i < count; ++i) {
    auto element = [&](size_t source) {
      T value;
      memcpy(&value, sources[source] + i * sizeof(T), sizeof(T));
      return value;
    };
    T all = element(sources.size() - 1);
    for (size_t k = sources.size() - 1; k-- > 0;) {
      if (how == kMax || how == kMin) {
        all = Combine<T>(how, all, element(k));
      } else {
        all = static_cast<T>(
            Combine<Wide>(how, static_cast<Wide>(all), static_cast<Wide>(element(k))));
      }
    }
    if (how == kAvg) all = static_cast<T>(all / static_cast<T>(sources.size()));
    memcpy(to + i * sizeof(T), &all, sizeof(T));
  }
}

float FromBfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}

uint16_t ToBfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float FromFloat16(uint16_t bits) {
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  const int exponent = bits >> 10 & 31;
  const auto fraction = static_cast<float>(bits & 1023);
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  return sign *
         (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25));
}

uint16_t ToFloat16(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520) return sign | 0x7c00;
  const int exponent = magnitude == 0 ? -14 : std::max(std::ilogb(magnitude), -14);
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  if (units < 1024) return static_cast<uint16_t>(sign | units);
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent + 14) << 10) + units));
}

template <float (*from)(uint16_t), uint16_t (*to_bits)(float)>
void FoldHalves(int how, const std::vector<const unsigned char*>& sources, size_t count,
                unsigned char* to) {
  for (size_t i = 0; i < count; ++i) {
    auto element = [&](size_t source) {
      uint16_t bits;
      memcpy(&bits, sources[source] + i * sizeof(bits), sizeof(bits));
      return from(bits);
    };
    float all = element(sources.size() - 1);
    for (size_t k = sources.size() - 1; k-- > 0;) all = Combine<float>(how, all, element(k));
    if (how == kAvg) all /= static_cast<float>(sources.size());
    const uint16_t bits = to_bits(all);
    memcpy(to + i * sizeof(bits), &bits, sizeof(bits));
  }
}

}  // namespace

size_t WidthOf(int type) {
  constexpr size_t kWidths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kWidths[type];
}

void Reduce(int type, int how, const std::vector<const unsigned char*>& sources, size_t count,
            unsigned char* to) {
  switch (type) {
    case 0:
      return Fold<int8_t, uint32_t>(how, sources, count, to);
    case 1:
      return Fold<uint8_t, uint32_t>(how, sources, count, to);
    case 2:
      return Fold<int32_t, uint32_t>(how, sources, count, to);
    case 3:
      return Fold<uint32_t, uint32_t>(how, sources, count, to);
    case 4:
      return Fold<int64_t, uint64_t>(how, sources, count, to);
    case 5:
      return Fold<uint64_t, uint64_t>(how, sources, count, to);
    case 6:
      return FoldHalves<FromFloat16, ToFloat16>(how, sources, count, to);
    case 7:
      return Fold<float, float>(how, sources, count, to);
    case 8:
      return Fold<double, double>(how, sources, count, to);
    default:
      return FoldHalves<FromBfloat16, ToBfloat16>(how, sources, count, to);
  }
}

}  // namespace nccl_double
