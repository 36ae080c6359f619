/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_avx512.cc
 * \brief The reductions for AVX-512 F, BW, VL and DQ; compiled with these enabled. Empty
 *        elsewhere.
 */
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace tvm_ipc {
namespace {

struct Isa {
  static constexpr size_t kBytes = 64;
  using Raw = __m512i;
  using F32 = __m512;
  using F64 = __m512d;

  static inline __mmask64 First(size_t bytes) { return (1ull << bytes) - 1; }
  static inline Raw LoadPart(const char* p, size_t bytes) {
    return _mm512_maskz_loadu_epi8(First(bytes), p);
  }
  static inline void StorePart(char* p, Raw v, size_t bytes) {
    _mm512_mask_storeu_epi8(p, First(bytes), v);
  }
  static constexpr bool kHasStream = true;
  static inline void Stream(void* p, Raw v) { _mm512_stream_si512(static_cast<Raw*>(p), v); }
  static inline void Fence() { _mm_sfence(); }
  static inline unsigned Unordered(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  static inline unsigned Unordered(F64 a, F64 b) { return _mm512_cmp_pd_mask(a, b, _CMP_UNORD_Q); }
  // The masked forms with full masks: g++ 12 warns of undefined lanes in its own plain ones.
  static constexpr __mmask16 kAll = 0xffff;
  static inline void WidenHalf(const char* p, F32* low, F32* high) {
    const __m256i* half = reinterpret_cast<const __m256i*>(p);
    *low = _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(half));
    *high = _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(half + 1));
  }
  static inline Raw NarrowHalf(F32 low, F32 high) {
    __m256i first = _mm512_maskz_cvtps_ph(kAll, low, _MM_FROUND_TO_NEAREST_INT);
    __m256i second = _mm512_maskz_cvtps_ph(kAll, high, _MM_FROUND_TO_NEAREST_INT);
    return __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7);
  }
};

}  // namespace
}  // namespace tvm_ipc

#include "shm/reduce_impl.h"

namespace tvm_ipc {
constexpr ReduceTable kAvx512Table = MakeTable("avx512");
}  // namespace tvm_ipc
#endif  // __x86_64__
