/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file blas_portable.cc
 * \brief The kernels beside a BLAS for every machine: vectors of 16 bytes.
 */
#include <cstddef>
#include <cstdint>

#include "reduce_half.h"

namespace tvm_ipc {
namespace {

struct Isa {
  static constexpr size_t kBytes = 16;
  static constexpr int64_t kLanes = 4;
  typedef float F32 __attribute__((vector_size(16)));
  typedef uint32_t U32 __attribute__((vector_size(16)));
  typedef int32_t I32 __attribute__((vector_size(16)));
  typedef uint16_t U16 __attribute__((vector_size(8)));

  static inline U32 Load(const char* p) {
    U16 v;
    __builtin_memcpy(&v, p, sizeof(v));
    return __builtin_convertvector(v, U32);
  }
  static inline void NarrowBrain(char* p, U32 words) {
    U16 v = __builtin_convertvector(words, U16);
    __builtin_memcpy(p, &v, sizeof(v));
  }
  static inline F32 WidenBrain(const char* p) { return (F32)(Load(p) << 16); }
  static inline F32 WidenHalf(const char* p) {
    U32 half = Load(p);
    // The arithmetic is for numbers and infinities only.
    U32 nan = (U32)((half & 0x7fffu) > 0x7c00u);
    return (F32)((U32)SoftWidenHalf<F32, I32, U32>(half) | (nan & 0x7fc00000u));
  }
  static inline void NarrowHalf(char* p, F32 v) {
    U32 number = (U32)(v == v);
    NarrowBrain(p, (SoftNarrowHalf<F32, I32, U32>(v) & number) | (0x7e00u & ~number));
  }
  static inline float Sum(F32 v) { return (v[0] + v[1]) + (v[2] + v[3]); }
};

}  // namespace
}  // namespace tvm_ipc

#include "blas_impl.h"

namespace tvm_ipc {
constexpr BlasKernels kPortableBlas = MakeBlasKernels("portable");
}  // namespace tvm_ipc
