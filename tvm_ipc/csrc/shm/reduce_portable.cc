/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_portable.cc
 * \brief The reductions for every machine, with vectors of 16 bytes, which compilers map to the
 *        available instructions.
 */
#include <cstddef>
#include <cstdint>

#include "core/software_float16_conversion.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tvm_ipc {
namespace {

struct Isa {
  static constexpr size_t kBytes = 16;
  typedef uint32_t Raw __attribute__((vector_size(16)));
  typedef int32_t Int __attribute__((vector_size(16)));
  typedef float F32 __attribute__((vector_size(16)));
  typedef double F64 __attribute__((vector_size(16)));

  static inline Raw LoadPart(const char* p, size_t bytes) {
    Raw v = {};
    __builtin_memcpy(&v, p, bytes);
    return v;
  }
  static inline void StorePart(char* p, Raw v, size_t bytes) { __builtin_memcpy(p, &v, bytes); }

#if defined(__SSE2__)
  static constexpr bool kHasStream = true;
  static inline void Stream(void* p, Raw v) {
    _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)v);
  }
  static inline void Fence() { _mm_sfence(); }
  static inline unsigned Unordered(F32 a, F32 b) {
    return static_cast<unsigned>(_mm_movemask_ps(_mm_cmpunord_ps((__m128)a, (__m128)b)));
  }
  static inline unsigned Unordered(F64 a, F64 b) {
    return static_cast<unsigned>(_mm_movemask_pd(_mm_cmpunord_pd((__m128d)a, (__m128d)b)));
  }
#else
  static constexpr bool kHasStream = false;
  static inline void Stream(void* p, Raw v) { __builtin_memcpy(p, &v, sizeof(v)); }
  static inline void Fence() {}
  static inline unsigned Unordered(F32 a, F32 b) { return Set((a != a) | (b != b)); }
  static inline unsigned Unordered(F64 a, F64 b) { return Set((a != a) | (b != b)); }
  template <typename Mask>
  static inline unsigned Set(Mask mask) {
    uint64_t words[2];
    __builtin_memcpy(words, &mask, sizeof(words));
    return (words[0] | words[1]) != 0;
  }
#endif

  static inline void Halves(Raw a, Raw b, Raw* upper, Raw* lower) {
    *upper = (a >> 16) | (b & 0xffff0000u);
    *lower = (a & 0xffffu) | (b << 16);
  }
  // A word holds two elements.
  static inline void WidenHalf(const char* p, F32* low, F32* high) {
    Raw v;
    __builtin_memcpy(&v, p, sizeof(v));
    *low = SoftWidenHalf<F32, Int, Raw>(v & 0xffffu);
    *high = SoftWidenHalf<F32, Int, Raw>(v >> 16);
  }
  static inline Raw NarrowHalf(F32 low, F32 high) {
    return SoftNarrowHalf<F32, Int, Raw>(low) | (SoftNarrowHalf<F32, Int, Raw>(high) << 16);
  }
  static constexpr bool kHalvesInOrder = false;
  static constexpr bool kFused = false;
  static inline F32 MultiplyAdd(F32 a, F32 b, F32 c) { return a * b + c; }
};

}  // namespace
}  // namespace tvm_ipc

#include "shm/reduce_impl.h"

namespace tvm_ipc {
constexpr ReduceTable kPortableTable = MakeTable("portable");
}  // namespace tvm_ipc
