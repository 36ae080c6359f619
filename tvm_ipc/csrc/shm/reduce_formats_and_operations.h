/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_formats_and_operations.h
 * \brief Element formats and operations on vectors of them; part of reduce_impl.h, which documents
 *        `Isa`.
 */
#ifndef TVM_IPC_SHM_REDUCE_FORMATS_AND_OPERATIONS_H_
#define TVM_IPC_SHM_REDUCE_FORMATS_AND_OPERATIONS_H_

#include <cstddef>
#include <cstdint>

#include "core/software_float16_conversion.h"

#define TVM_IPC_INLINE inline __attribute__((always_inline))

namespace tvm_ipc {
namespace {

using Raw = Isa::Raw;
constexpr size_t kVector = Isa::kBytes;

template <typename T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(Isa::kBytes)));
};

TVM_IPC_INLINE Raw Load(const char* p) {
  Raw v;
  __builtin_memcpy(&v, p, kVector);
  return v;
}

// A format specifies how elements are stored in memory and in which type they are accumulated. A
// vector in memory becomes kParts vectors of accumulators. The order of lanes inside does not
// matter as long as Pack is the inverse of Unpack.

/*! \brief Defaults of most formats. */
struct Plain {
  /*! \brief Whether Pack is wrong for elements that are Unusual; Exact::Pack handles these. */
  static constexpr bool kNormalsOnly = false;
  template <typename V>
  static TVM_IPC_INLINE V Add(V a, V x) {
    return a + x;
  }
};

/*! \brief A format that accumulates in the element type. For integers, the result is the same as
 *         wrapping at the end. */
template <typename T>
struct Native : Plain {
  using Element = T;
  using Scalar = T;
  using Vector = typename VectorOf<T>::Type;
  static constexpr int kParts = 1;
  static TVM_IPC_INLINE void Unpack(const char* p, Vector* out) { *out = (Vector)Load(p); }
  static TVM_IPC_INLINE Raw Pack(const Vector* in) { return (Raw)*in; }
};

struct Float32 : Native<float> {
  using Bits = uint32_t;
  static constexpr Bits kQuiet = 0x00400000u, kInfinity = 0x7f800000u, kMagnitude = 0x7fffffffu;
  static float Widen(Bits bits) { return BitCast<float>(bits); }
  static Bits Narrow(float value) { return BitCast<Bits>(value); }
};

struct Float64 : Native<double> {
  using Bits = uint64_t;
  static constexpr Bits kQuiet = 1ull << 51, kInfinity = 0x7ffull << 52, kMagnitude = ~0ull >> 1;
  static double Widen(Bits bits) { return BitCast<double>(bits); }
  static Bits Narrow(double value) { return BitCast<Bits>(value); }
};

using Words = VectorOf<uint32_t>::Type;
using Floats = VectorOf<float>::Type;

using Signed16 = VectorOf<int16_t>::Type;
using Unsigned16 = VectorOf<uint16_t>::Type;

struct BFloat16 : Plain {
  using Element = uint16_t;
  using Scalar = float;
  using Vector = Floats;
  using Bits = uint16_t;
  static constexpr Bits kQuiet = 0x0040, kInfinity = 0x7f80, kMagnitude = 0x7fff;
  static constexpr int kParts = 2;
  // A word holds two elements: the lower one is shifted up, the upper one is already in position.
  static TVM_IPC_INLINE void Unpack(const char* p, Vector* out) {
    Words words = (Words)Load(p);
    out[0] = (Vector)(words << 16);
    out[1] = (Vector)(words & 0xffff0000u);
  }
  // Round to nearest even: up if the lower half is more than half a unit of the upper one, or
  // exactly half a unit and the upper one is odd. A carry reaches infinity, as it should.
  static TVM_IPC_INLINE Raw Pack(const Vector* in) {
    Raw upper, lower;
    Isa::Halves((Raw)in[0], (Raw)in[1], &upper, &lower);
    Signed16 beyond =
        (Signed16)((Unsigned16)lower ^ 0x8000);  // the lower half minus half a unit, signed
    Unsigned16 up = (Unsigned16)(beyond > -((Signed16)upper & 1));
    return (Raw)((Unsigned16)upper - up);
  }
  static float Widen(Bits bits) { return BitCast<float>(static_cast<uint32_t>(bits) << 16); }
  static Bits Narrow(float value) {
    uint32_t bits = BitCast<uint32_t>(value);
    return static_cast<Bits>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct Float16 : Plain {
  using Element = uint16_t;
  using Scalar = float;
  using Vector = Floats;
  using Bits = uint16_t;
  static constexpr Bits kQuiet = 0x0200, kInfinity = 0x7c00, kMagnitude = 0x7fff;
  static constexpr int kParts = 2;
  static TVM_IPC_INLINE void Unpack(const char* p, Vector* out) {
    Isa::F32 low, high;
    Isa::WidenHalf(p, &low, &high);
    out[0] = (Vector)low;
    out[1] = (Vector)high;
  }
  static TVM_IPC_INLINE Raw Pack(const Vector* in) {
    return Isa::NarrowHalf((Isa::F32)in[0], (Isa::F32)in[1]);
  }
  using Plain::Add;
  // A multiply-add gives the same bits, but additions wait for units that conversions keep busy.
  static TVM_IPC_INLINE Vector Add(Vector a, Vector x) {
    if (!Isa::kFused) return a + x;
    Vector one = Vector{} + 1.0f;
    __asm__("" : "+x"(one));  // keeps the compiler from replacing it by an addition
    return (Vector)Isa::MultiplyAdd((Isa::F32)a, (Isa::F32)one, (Isa::F32)x);
  }
  static float Widen(Bits bits) {
    return SoftWidenHalf<float, int32_t>(static_cast<uint32_t>(bits));
  }
  static Bits Narrow(float value) {
    return static_cast<Bits>(SoftNarrowHalf<float, int32_t, uint32_t>(value));
  }
};

// Operations on a scalar or a vector of a format. kSticky: a NaN in an operand reaches the result.
// kTree: the sources are combined as a balanced binary tree, not one after the other.

struct Sum {
  static constexpr bool kSticky = true, kDivide = false, kTruth = false, kTree = false;
  // Whether the most frequent case, two sources, is compiled separately.
  static constexpr bool kOften = true;
  template <typename Format, typename V>
  static TVM_IPC_INLINE V Apply(V a, V x) {
    return Format::Add(a, x);
  }
};

struct TreeSum : Sum {
  static constexpr bool kTree = true;
};

struct Average : Sum {
  static constexpr bool kDivide = true;
};

struct Product : Sum {
  static constexpr bool kOften = false;
  template <typename Format, typename V>
  static TVM_IPC_INLINE V Apply(V a, V x) {
    return a * x;
  }
};

struct Minimum : Sum {
  static constexpr bool kSticky = false, kOften = false;
  template <typename Format, typename V>
  static TVM_IPC_INLINE V Apply(V a, V x) {
    return x < a ? x : a;
  }
};

struct Maximum : Minimum {
  template <typename Format, typename V>
  static TVM_IPC_INLINE V Apply(V a, V x) {
    return x > a ? x : a;
  }
};

/*! \brief Bitwise operations on integers. */
struct BitwiseAnd : Minimum {
  template <typename Format, typename V>
  static TVM_IPC_INLINE V Apply(V a, V x) {
    return a & x;
  }
};
struct BitwiseOr : Minimum {
  template <typename Format, typename V>
  static TVM_IPC_INLINE V Apply(V a, V x) {
    return a | x;
  }
};
struct BitwiseXor : Minimum {
  template <typename Format, typename V>
  static TVM_IPC_INLINE V Apply(V a, V x) {
    return a ^ x;
  }
};

/*! \brief Logical operations on bytes, of which only zero is false; the result is 0 or 1. */
struct All : Minimum {
  static constexpr bool kTruth = true;
};
struct Any : Maximum {
  static constexpr bool kTruth = true;
};

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_REDUCE_FORMATS_AND_OPERATIONS_H_
