/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernel_table_portable.cc
 * \brief The kernels of kernels_complementing_blas.h for every machine, with vectors of 16 bytes.
 */
#include <cstddef>
#include <cstdint>

#include "core/software_float16_conversion.h"

namespace tvm_ipc {
namespace {

struct Isa {
  static constexpr size_t kBytes = 16;
  static constexpr int64_t kLanes = 4;
  typedef float F32 __attribute__((vector_size(16)));
  typedef uint32_t U32 __attribute__((vector_size(16)));
  typedef int32_t I32 __attribute__((vector_size(16)));
  typedef uint16_t U16 __attribute__((vector_size(8)));

  using Raw16 = U16;

  static inline U16 Load16(const char* p) { return Load16Part(p, kLanes); }
  static inline U16 Load16Part(const char* p, int64_t count) {
    U16 v = {};
    __builtin_memcpy(&v, p, count * 2);
    return v;
  }
  static inline void Store16(char* p, U16 v) { __builtin_memcpy(p, &v, sizeof(v)); }
  static inline void Store16Part(char* p, U16 v, int64_t count) {
    __builtin_memcpy(p, &v, count * 2);
  }
  static inline F32 Load32Part(const char* p, int64_t count) {
    F32 v = {};
    __builtin_memcpy(&v, p, count * 4);
    return v;
  }
  static inline void Store32Part(char* p, F32 v, int64_t count) {
    __builtin_memcpy(p, &v, count * 4);
  }
  static inline U16 Lower(U32 words) { return __builtin_convertvector(words, U16); }
  static inline F32 WidenBrain(U16 raw) { return (F32)(__builtin_convertvector(raw, U32) << 16); }
  static inline F32 WidenHalf(U16 raw) {
    U32 half = __builtin_convertvector(raw, U32);
    // SoftWidenHalf handles numbers and infinities only, so NaNs are selected separately.
    U32 nan = (U32)((half & 0x7fffu) > 0x7c00u);
    return (F32)((U32)SoftWidenHalf<F32, I32, U32>(half) | (nan & 0x7fc00000u));
  }
  static inline U16 NarrowHalf(F32 v) {
    U32 number = (U32)(v == v);
    return Lower((SoftNarrowHalf<F32, I32, U32>(v) & number) | (0x7e00u & ~number));
  }
  template <typename Vector>
  static inline void Transpose(Vector* rows) {
    const Vector t0 = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
    const Vector t1 = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
    const Vector t2 = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
    const Vector t3 = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
    rows[0] = __builtin_shufflevector(t0, t2, 0, 1, 4, 5);
    rows[1] = __builtin_shufflevector(t0, t2, 2, 3, 6, 7);
    rows[2] = __builtin_shufflevector(t1, t3, 0, 1, 4, 5);
    rows[3] = __builtin_shufflevector(t1, t3, 2, 3, 6, 7);
  }
  template <typename Vector>
  static inline void LoadTransposed(Vector* rows, const char* from, int64_t stride) {
    for (int64_t i = 0; i < kLanes; ++i) {
      __builtin_memcpy(rows + i, from + i * stride, sizeof(Vector));
    }
    Transpose(rows);
  }
  static inline F32 Fma(F32 a, F32 b, F32 sum) { return a * b + sum; }
  static inline float Sum(F32 v) { return (v[0] + v[1]) + (v[2] + v[3]); }
};

}  // namespace
}  // namespace tvm_ipc

#include "blas/kernel_table_of_instruction_set.h"

namespace tvm_ipc {
constexpr BlasKernels kPortableBlas = MakeBlasKernels("portable");
}  // namespace tvm_ipc
