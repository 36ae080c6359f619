/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_avx2.cc
 * \brief The reductions for AVX2, F16C and FMA; compiled with these enabled. Empty on other
 *        architectures.
 */
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace tvm_ipc {
namespace {

struct Isa {
  static constexpr size_t kBytes = 32;
  using Raw = __m256i;
  using F32 = __m256;
  using F64 = __m256d;

  static inline Raw LoadPart(const char* p, size_t bytes) {
    Raw v = {};
    __builtin_memcpy(&v, p, bytes);
    return v;
  }
  static inline void StorePart(char* p, Raw v, size_t bytes) { __builtin_memcpy(p, &v, bytes); }
  static constexpr bool kHasStream = true;
  static inline void Stream(void* p, Raw v) { _mm256_stream_si256(static_cast<Raw*>(p), v); }
  static inline void Fence() { _mm_sfence(); }
  static inline unsigned Unordered(F32 a, F32 b) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)));
  }
  static inline unsigned Unordered(F64 a, F64 b) {
    return static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_UNORD_Q)));
  }
  static inline void Halves(Raw a, Raw b, Raw* upper, Raw* lower) {
    *upper = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa);
    *lower = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
  }
  static inline void WidenHalf(const char* p, F32* low, F32* high) {
    const __m128i* half = reinterpret_cast<const __m128i*>(p);
    *low = _mm256_cvtph_ps(_mm_loadu_si128(half));
    *high = _mm256_cvtph_ps(_mm_loadu_si128(half + 1));
  }
  static inline Raw NarrowHalf(F32 low, F32 high) {
    return _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT)),
        _mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT), 1);
  }
  static constexpr bool kHalvesInOrder = true;
  static constexpr bool kFused = true;
  static inline F32 MultiplyAdd(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace tvm_ipc

#include "shm/reduce_impl.h"

namespace tvm_ipc {
constexpr ReduceTable kAvx2Table = MakeTable("avx2");
}  // namespace tvm_ipc
#endif  // __x86_64__
