/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file element.h
 * \brief Element types: how they are packed into 8 bytes, and their accumulator types.
 */
#ifndef TVM_IPC_CUDA_KERNELS_ELEMENT_H_
#define TVM_IPC_CUDA_KERNELS_ELEMENT_H_

#include "cuda/kernels/device_intrinsics.h"

namespace tvm_ipc {
namespace kernels {

/*! \brief The unsigned type for the bits of an element of kBytes. */
template <int kBytes>
struct BitsOf;
template <>
struct BitsOf<1> {
  using Type = uint8_t;
};
template <>
struct BitsOf<2> {
  using Type = uint16_t;
};
template <>
struct BitsOf<4> {
  using Type = uint32_t;
};
template <>
struct BitsOf<8> {
  using Type = uint64_t;
};

/*! \brief An element type of kBytes that is accumulated in an Accumulator. */
template <int kBytes, typename Accumulator>
struct Plain {
  static constexpr int kWidth = kBytes;
  /*! \brief The number of elements in 8 bytes. */
  static constexpr int kIn8 = 8 / kBytes;
  using Bits = typename BitsOf<kBytes>::Type;
  using Scalar = Accumulator;
  static constexpr bool kFloating = false;
  /*! \brief Whether the accumulator holds the sum of a few elements, as averages require. */
  static constexpr bool kHoldsSums = true;
  static constexpr bool kTruth = false;
  /*!
   * \brief The number of sources that a thread loads at once: a load takes as long as a hundred
   *        additions. Only the types that models use have more than one; more code for all types
   *        would take minutes to compile.
   */
  static constexpr int kAtOnce = 1;
};

/*! \brief An integer type. Sums and products finally wrap around as in the type itself. */
template <typename T, typename Accumulator>
struct Integer : Plain<sizeof(T), Accumulator> {
  static constexpr bool kHoldsSums = sizeof(T) < sizeof(Accumulator);
  static constexpr bool kSigned = static_cast<T>(-1) < static_cast<T>(0);
  using Bits = typename Plain<sizeof(T), Accumulator>::Bits;
  static TVM_IPC_DEVICE Accumulator Widen(Bits bits) {
    return static_cast<Accumulator>(static_cast<T>(bits));
  }
  static TVM_IPC_DEVICE Bits Narrow(Accumulator value) { return static_cast<Bits>(value); }
  // Use unsigned arithmetic, because signed overflow is undefined.
  static TVM_IPC_DEVICE Accumulator Add(Accumulator a, Accumulator x) {
    return static_cast<Accumulator>(static_cast<uint64_t>(a) + static_cast<uint64_t>(x));
  }
  static TVM_IPC_DEVICE Accumulator Multiply(Accumulator a, Accumulator x) {
    return static_cast<Accumulator>(static_cast<uint64_t>(a) * static_cast<uint64_t>(x));
  }
  static TVM_IPC_DEVICE Accumulator Divide(Accumulator a, int size) { return a / size; }
};

/*! \brief Booleans: a byte is false only if it is zero. The result is 0 or 1. */
struct Bool : Integer<uint8_t, int32_t> {
  static constexpr bool kTruth = true;
  static TVM_IPC_DEVICE int32_t Widen(uint8_t bits) { return bits != 0; }
};

template <int kBytes, typename Accumulator>
struct Floating : Plain<kBytes, Accumulator> {
  static constexpr bool kFloating = true;
  static TVM_IPC_DEVICE Accumulator Add(Accumulator a, Accumulator x) { return a + x; }
  static TVM_IPC_DEVICE Accumulator Multiply(Accumulator a, Accumulator x) { return a * x; }
  static TVM_IPC_DEVICE Accumulator Divide(Accumulator a, int size) {
    return a / static_cast<Accumulator>(size);
  }
};

struct Float16 : Floating<2, float> {
  static constexpr int kAtOnce = 8;
  static constexpr Bits kQuiet = 0x0200, kInfinity = 0x7c00, kMagnitude = 0x7fff;
  static TVM_IPC_DEVICE float Widen(Bits bits) { return WidenHalf(bits); }
  static TVM_IPC_DEVICE Bits Narrow(float value) { return NarrowHalf(value); }
};

struct BFloat16 : Floating<2, float> {
  static constexpr int kAtOnce = 8;
  static constexpr Bits kQuiet = 0x0040, kInfinity = 0x7f80, kMagnitude = 0x7fff;
  static TVM_IPC_DEVICE float Widen(Bits bits) { return WidenBFloat(bits); }
  static TVM_IPC_DEVICE Bits Narrow(float value) { return NarrowBFloat(value); }
};

struct Float32 : Floating<4, float> {
  static constexpr int kAtOnce = 8;
  static constexpr Bits kQuiet = 0x00400000u, kInfinity = 0x7f800000u, kMagnitude = 0x7fffffffu;
  static TVM_IPC_DEVICE float Widen(Bits bits) { return BitCast<float>(bits); }
  static TVM_IPC_DEVICE Bits Narrow(float value) { return BitCast<Bits>(value); }
};

struct Float64 : Floating<8, double> {
  static constexpr Bits kQuiet = 1ull << 51, kInfinity = 0x7ffull << 52, kMagnitude = ~0ull >> 1;
  static TVM_IPC_DEVICE double Widen(Bits bits) { return BitCast<double>(bits); }
  static TVM_IPC_DEVICE Bits Narrow(double value) { return BitCast<Bits>(value); }
};

using Int8 = Integer<int8_t, int32_t>;
using UInt8 = Integer<uint8_t, int32_t>;
using Int16 = Integer<int16_t, int32_t>;
using UInt16 = Integer<uint16_t, int32_t>;
using Int32 = Integer<int32_t, int64_t>;
using UInt32 = Integer<uint32_t, int64_t>;
using Int64 = Integer<int64_t, int64_t>;
using UInt64 = Integer<uint64_t, uint64_t>;

/*! \brief Return element i of 8 bytes. */
template <typename Type>
TVM_IPC_DEVICE typename Type::Bits At(uint64_t eight, int i) {
  return static_cast<typename Type::Bits>(eight >> (8 * Type::kWidth * i % 64));
}

/*! \brief Return 8 bytes with element i set to `bits`; it must be zero before. */
template <typename Type>
TVM_IPC_DEVICE uint64_t With(uint64_t eight, int i, typename Type::Bits bits) {
  return eight | static_cast<uint64_t>(bits) << (8 * Type::kWidth * i % 64);
}

/*! \brief Load up to 8 bytes, element by element, with zeros beyond `bytes`. */
template <int kWidth>
TVM_IPC_RARE uint64_t LoadElements(const uint8_t* from, uint64_t bytes) {
  using Bits = typename BitsOf<kWidth>::Type;
  uint64_t eight = 0;
#pragma unroll 1
  for (uint32_t at = 0; at < 8 && at < bytes; at += kWidth) {
    eight |= static_cast<uint64_t>(*reinterpret_cast<const Bits*>(from + at)) << (8 * at);
  }
  return eight;
}
/*! \brief Store up to 8 bytes, element by element; memory beyond `bytes` stays unchanged. */
template <int kWidth>
TVM_IPC_RARE void StoreElements(uint8_t* to, uint64_t eight, uint64_t bytes) {
  using Bits = typename BitsOf<kWidth>::Type;
#pragma unroll 1
  for (uint32_t at = 0; at < 8 && at < bytes; at += kWidth) {
    *reinterpret_cast<Bits*>(to + at) = static_cast<Bits>(eight >> (8 * at));
  }
}

TVM_IPC_DEVICE bool IsAligned(const void* pointer, int bytes) {
  return (reinterpret_cast<uintptr_t>(pointer) & (bytes - 1)) == 0;
}

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_ELEMENT_H_
