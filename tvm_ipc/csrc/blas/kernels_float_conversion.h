/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_float_conversion.h
 * \brief Conversion of elements of each type to and from vectors of float32; part of
 *        kernel_table_of_instruction_set.h, which documents `Isa`.
 */
#ifndef TVM_IPC_BLAS_KERNELS_FLOAT_CONVERSION_H_
#define TVM_IPC_BLAS_KERNELS_FLOAT_CONVERSION_H_

#include "blas/kernels_complementing_blas.h"

#define TVM_IPC_INLINE inline __attribute__((always_inline))

namespace tvm_ipc {
namespace {

typedef float Floats __attribute__((vector_size(Isa::kBytes)));
typedef uint32_t Words __attribute__((vector_size(Isa::kBytes)));
typedef int32_t Ints __attribute__((vector_size(Isa::kBytes)));
constexpr int64_t kLanes = Isa::kLanes;

TVM_IPC_INLINE Floats Splat(float x) { return x - (Floats){}; }

/*! \brief Loads and stores of an element type as float32. */
template <FloatType type>
struct Format;

template <>
struct Format<kFloat32> {
  static constexpr int64_t kSize = 4;
  static TVM_IPC_INLINE Floats Load(const char* p) {
    Floats v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
  static TVM_IPC_INLINE void Store(char* p, Floats v) { __builtin_memcpy(p, &v, sizeof(v)); }
  static TVM_IPC_INLINE Floats LoadPart(const char* p, int64_t count) {
    return Isa::Load32Part(p, count);
  }
  static TVM_IPC_INLINE void StorePart(char* p, Floats v, int64_t count) {
    Isa::Store32Part(p, v, count);
  }
};

/*! \brief Loads and stores of a 16-bit type; only `Conversion` differs between the two types. */
template <typename Conversion>
struct Format16 {
  static constexpr int64_t kSize = 2;
  static TVM_IPC_INLINE Floats Load(const char* p) { return Conversion::Widen(Isa::Load16(p)); }
  static TVM_IPC_INLINE void Store(char* p, Floats v) { Isa::Store16(p, Conversion::Narrow(v)); }
  static TVM_IPC_INLINE Floats LoadPart(const char* p, int64_t count) {
    return Conversion::Widen(Isa::Load16Part(p, count));
  }
  static TVM_IPC_INLINE void StorePart(char* p, Floats v, int64_t count) {
    Isa::Store16Part(p, Conversion::Narrow(v), count);
  }
};

struct HalfConversion {
  static TVM_IPC_INLINE Floats Widen(Isa::Raw16 raw) { return Isa::WidenHalf(raw); }
  static TVM_IPC_INLINE Isa::Raw16 Narrow(Floats v) { return Isa::NarrowHalf(v); }
};

struct BrainConversion {
  static TVM_IPC_INLINE Floats Widen(Isa::Raw16 raw) { return Isa::WidenBrain(raw); }
  static TVM_IPC_INLINE Isa::Raw16 Narrow(Floats v) {
    Words bits = (Words)v;
    // Round to nearest even. Make a NaN quiet instead, because the carry could make it infinite.
    Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    Words quiet = (bits >> 16) | 0x40u;
    Words number = (Words)(v == v);
    return Isa::Lower((rounded & number) | (quiet & ~number));
  }
};

template <>
struct Format<kFloat16> : Format16<HalfConversion> {};
template <>
struct Format<kBFloat16> : Format16<BrainConversion> {};

template <FloatType type>
TVM_IPC_INLINE Floats LoadPart(const char* p, int64_t count) {
  return Format<type>::LoadPart(p, count);
}

template <FloatType type>
TVM_IPC_INLINE void StorePart(char* p, Floats v, int64_t count) {
  Format<type>::StorePart(p, v, count);
}

template <FloatType type>
void Widen(float* to, const char* from, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Format<kFloat32>::Store((char*)(to + i), Format<type>::Load(from + i * Format<type>::kSize));
  }
  if (i < count) {
    StorePart<kFloat32>((char*)(to + i), LoadPart<type>(from + i * Format<type>::kSize, count - i),
                        count - i);
  }
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_FLOAT_CONVERSION_H_
