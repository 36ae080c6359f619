/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file normalize_row_impl.h
 * \brief Normalisation of a row, written once over vectors; part of reduce_impl.h.
 *
 * All arithmetic is float32. A sum has 32 lanes, element i in lane i % 32, which are added in a
 * tree, so it has the same bits on every instruction set. A variance is computed from the
 * differences from the mean in a second pass, which avoids cancellation if the mean is large.
 */
#ifndef TVM_IPC_SHM_NORMALIZE_ROW_IMPL_H_
#define TVM_IPC_SHM_NORMALIZE_ROW_IMPL_H_

#include <cstddef>
#include <cstdint>

#include "shm/reduce_formats_and_operations.h"
#include "shm/reduce_table.h"

namespace tvm_ipc {
namespace {

constexpr size_t kLanes = 32;
constexpr size_t kFloats = kVector / sizeof(float);
constexpr size_t kRegisters = kLanes / kFloats;

using Ints = VectorOf<int32_t>::Type;
/*! \brief A vector of as many 16-bit elements as a vector has floats. */
typedef uint16_t Shorts __attribute__((vector_size(Isa::kBytes / 2)));

/*! \brief Consecutive elements as floats, in order. */
struct Lanes {
  Floats v[kRegisters];
};

template <typename Format>
struct IsHalf {
  static constexpr bool value = false;
};
template <>
struct IsHalf<Float16> {
  static constexpr bool value = true;
};

template <typename Format>
struct InOrder;

template <>
struct InOrder<Float32> {
  using Element = float;
  static TVM_IPC_INLINE Lanes Load(const float* p) {
    Lanes lanes;
    __builtin_memcpy(&lanes, p, sizeof(lanes));
    return lanes;
  }
  static TVM_IPC_INLINE void Store(float* p, const Lanes& lanes) {
    __builtin_memcpy(p, &lanes, sizeof(lanes));
  }
};

template <>
struct InOrder<BFloat16> {
  using Element = uint16_t;
  static TVM_IPC_INLINE Lanes Load(const uint16_t* p) {
    Lanes lanes;
    for (size_t i = 0; i < kRegisters; ++i) {
      Shorts half;
      __builtin_memcpy(&half, p + i * kFloats, sizeof(half));
      lanes.v[i] = (Floats)(__builtin_convertvector(half, Words) << 16);
    }
    return lanes;
  }
  static TVM_IPC_INLINE void Store(uint16_t* p, const Lanes& lanes) {
    for (size_t i = 0; i < kRegisters; ++i) {
      const Words bits = (Words)lanes.v[i];
      const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      const Words nan = (bits & 0u) + 0x7fc0u;
      const Shorts half = __builtin_convertvector(lanes.v[i] == lanes.v[i] ? rounded : nan, Shorts);
      __builtin_memcpy(p + i * kFloats, &half, sizeof(half));
    }
  }
};

template <>
struct InOrder<Float16> {
  using Element = uint16_t;
  static TVM_IPC_INLINE Lanes Load(const uint16_t* p) {
    Lanes lanes;
    for (size_t i = 0; i < kRegisters; i += 2) {
      const uint16_t* from = p + i * kFloats;
      if constexpr (Isa::kHalvesInOrder) {
        Isa::F32 low, high;
        Isa::WidenHalf(reinterpret_cast<const char*>(from), &low, &high);
        lanes.v[i] = (Floats)low;
        lanes.v[i + 1] = (Floats)high;
      } else {
        Shorts half[2];
        __builtin_memcpy(half, from, sizeof(half));
        for (size_t k = 0; k < 2; ++k) {
          lanes.v[i + k] =
              SoftWidenHalf<Floats, Ints, Words>(__builtin_convertvector(half[k], Words));
        }
      }
    }
    return lanes;
  }
  static TVM_IPC_INLINE void Store(uint16_t* p, const Lanes& lanes) {
    for (size_t i = 0; i < kRegisters; i += 2) {
      uint16_t* to = p + i * kFloats;
      if constexpr (Isa::kHalvesInOrder) {
        const Raw raw = Isa::NarrowHalf((Isa::F32)lanes.v[i], (Isa::F32)lanes.v[i + 1]);
        __builtin_memcpy(to, &raw, sizeof(raw));
      } else {
        for (size_t k = 0; k < 2; ++k) {
          const Floats value = lanes.v[i + k];
          const Words bits = SoftNarrowHalf<Floats, Ints, Words>(value);
          const Words nan = (bits & 0u) + 0x7e00u;
          const Shorts half = __builtin_convertvector(value == value ? bits : nan, Shorts);
          __builtin_memcpy(to + k * kFloats, &half, sizeof(half));
        }
      }
    }
  }
};

/*! \brief Load the first `count` elements of a block, and zeros for the others. */
template <typename Format>
TVM_IPC_INLINE Lanes LoadSome(const typename InOrder<Format>::Element* p, size_t count) {
  typename InOrder<Format>::Element block[kLanes] = {};
  __builtin_memcpy(block, p, count * sizeof(block[0]));
  return InOrder<Format>::Load(block);
}

/*! \brief Return the sum of `term` over all elements of a row. */
template <typename Format, typename Term>
TVM_IPC_INLINE float SumOf(const typename InOrder<Format>::Element* row, size_t count, Term term) {
  Lanes total = {};
  size_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    const Lanes x = InOrder<Format>::Load(row + at);
    for (size_t i = 0; i < kRegisters; ++i) total.v[i] += term(x.v[i]);
  }
  float lanes[kLanes];
  if (at < count) {
    Lanes terms = LoadSome<Format>(row + at, count - at);
    for (size_t i = 0; i < kRegisters; ++i) terms.v[i] = term(terms.v[i]);
    __builtin_memcpy(lanes, &terms, sizeof(lanes));
    for (size_t i = count - at; i < kLanes; ++i) lanes[i] = 0;  // no terms beyond the end
    terms = InOrder<Float32>::Load(lanes);
    for (size_t i = 0; i < kRegisters; ++i) total.v[i] += terms.v[i];
  }
  __builtin_memcpy(lanes, &total, sizeof(lanes));
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

/*! \brief The value to subtract from each element of a row, and the factor to multiply by then. */
struct Moments {
  float mean;
  float scale;
};

// Not inline: this is most of the code to compile, and it does not depend on the output type.
template <typename From, bool kCentred>
__attribute__((noinline)) Moments MomentsOf(const typename InOrder<From>::Element* row,
                                            const NormRow& norm) {
  const size_t count = norm.count;
  const float size = static_cast<float>(count);
  float mean = 0;
  if (kCentred) mean = SumOf<From>(row, count, [](Floats x) { return x; }) / size;
  const Floats middle = Floats{} + mean;
  const float squares = SumOf<From>(row, count, [middle](Floats x) {
    const Floats difference = kCentred ? x - middle : x;
    return difference * difference;
  });
  return {mean, 1.0f / __builtin_sqrtf(squares / size + norm.epsilon)};
}

template <typename From, typename To, bool kCentred>
TVM_IPC_INLINE void NormaliseAs(typename InOrder<To>::Element* out,
                                const typename InOrder<From>::Element* row, const NormRow& norm) {
  const size_t count = norm.count;
  const Moments moments = MomentsOf<From, kCentred>(row, norm);
  const Floats middle = Floats{} + moments.mean;
  const Floats scale = Floats{} + moments.scale;
  auto normalised = [&](Lanes x, const Lanes& weight, const Lanes& bias) {
    for (size_t i = 0; i < kRegisters; ++i) {
      if (kCentred) {
        x.v[i] = (x.v[i] - middle) * scale * weight.v[i] + bias.v[i];
      } else {
        x.v[i] = x.v[i] * scale * weight.v[i];
      }
    }
    return x;
  };
  size_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    const Lanes weight = InOrder<Float32>::Load(norm.weight + at);
    const Lanes bias = kCentred ? InOrder<Float32>::Load(norm.bias + at) : weight;
    InOrder<To>::Store(out + at, normalised(InOrder<From>::Load(row + at), weight, bias));
  }
  if (at == count) return;
  const size_t rest = count - at;
  const Lanes weight = LoadSome<Float32>(norm.weight + at, rest);
  const Lanes bias = kCentred ? LoadSome<Float32>(norm.bias + at, rest) : weight;
  typename InOrder<To>::Element last[kLanes];
  InOrder<To>::Store(last, normalised(LoadSome<From>(row + at, rest), weight, bias));
  __builtin_memcpy(out + at, last, rest * sizeof(last[0]));
}

template <typename From, typename To>
void Normalise(void* out, const void* row, const NormRow& norm) {
  auto* to = static_cast<typename InOrder<To>::Element*>(out);
  const auto* from = static_cast<const typename InOrder<From>::Element*>(row);
  if (norm.bias != nullptr) {
    NormaliseAs<From, To, true>(to, from, norm);
  } else {
    NormaliseAs<From, To, false>(to, from, norm);
  }
}

template <typename From>
void Widen(float* out, const void* elements, size_t count) {
  const auto* from = static_cast<const typename InOrder<From>::Element*>(elements);
  size_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    InOrder<Float32>::Store(out + at, InOrder<From>::Load(from + at));
  }
  const Lanes rest = LoadSome<From>(from + at, count - at);
  __builtin_memcpy(out + at, &rest, (count - at) * sizeof(float));
}

/*! \brief Replace the NaNs among rounded floats by quiet NaNs with the same sign and upper bits of
 *         the payload, the same on every instruction set. */
template <typename To>
__attribute__((noinline, cold)) void KeepNans(uint16_t* out, const float* from, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (from[i] == from[i]) continue;
    const uint32_t bits = BitCast<uint32_t>(from[i]);
    const uint32_t payload = IsHalf<To>::value ? bits >> 13 & 0x3ffu : bits >> 16 & 0x7fu;
    out[i] = static_cast<uint16_t>((bits >> 16 & 0x8000u) | To::kInfinity | To::kQuiet | payload);
  }
}

template <typename To>
void Narrow(void* out, const float* from, size_t count) {
  using Element = typename InOrder<To>::Element;
  auto* to = static_cast<Element*>(out);
  if constexpr (sizeof(Element) == sizeof(float)) {
    __builtin_memcpy(out, from, count * sizeof(float));
  } else {
    for (size_t at = 0; at < count; at += kLanes) {
      const size_t some = count - at < kLanes ? count - at : kLanes;
      const bool whole = some == kLanes;
      const Lanes lanes =
          whole ? InOrder<Float32>::Load(from + at) : LoadSome<Float32>(from + at, some);
      Element rounded[kLanes];
      InOrder<To>::Store(rounded, lanes);
      unsigned nan = 0;
      for (size_t i = 0; i < kRegisters; ++i) {
        nan |= Isa::Unordered((Isa::F32)lanes.v[i], (Isa::F32)lanes.v[i]);
      }
      if (__builtin_expect(nan != 0, 0)) KeepNans<To>(rounded, from + at, some);
      if (whole) {
        __builtin_memcpy(to + at, rounded, sizeof(rounded));
      } else {
        __builtin_memcpy(to + at, rounded, some * sizeof(Element));
      }
    }
  }
}

template <typename From>
constexpr NormKernels NormsOf() {
  return {Widen<From>,
          Narrow<From>,
          {Normalise<From, Float16>, Normalise<From, BFloat16>, Normalise<From, Float32>}};
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_NORMALIZE_ROW_IMPL_H_
