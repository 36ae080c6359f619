// SPDX-License-Identifier: Apache-2.0
/*!
 * \file peer_limit.c
 * \brief The bare memory bandwidth: every rank adds or copies private buffers, all at once, with
 *        no synchronisation at all. What no all-reduce can beat on this machine at this moment:
 *          copy    memcpy of the input to the output: the least any of them must do
 *          add     output = input + second input: a zero-copy one-shot of two ranks
 *          stream  the same with non-temporal stores
 *        These add so many bytes of float32 whatever the type: the least arithmetic there is.
 *
 *        And what is left of that between two cores that must hear from each other:
 *          oneshot the sum of both ranks' shared inputs in the type itself, between two spinning
 *                  barriers, with nothing around it: no checks, no choice, no way out of a wait.
 *                  Two 16-bit floats are widened, added and rounded to nearest even; there is no
 *                  rule for NaN, and the processor's own rounding to bfloat16, where it has one,
 *                  makes zeros of subnormal numbers.
 *
 * Usage: peer_limit SOCKET RANK MODE [SHARED_MEMORY_FD BYTES_PER_RANK]
 */
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#include <sys/mman.h>

#include "peer.h"

enum { kStreamBytes = 4 << 20 };  // from here on stream is the faster one

/*! \brief out = a + b, written past the caches if `past`, as far as there are instructions. */
typedef void (*Sum)(void* out, const void* a, const void* b, size_t bytes, int past);

static void sum_float32(void* out, const void* a, const void* b, size_t bytes, int past) {
  float* restrict to = out;
  const float* restrict x = a, * restrict y = b;
  size_t i = 0, n = bytes / 4;
#if defined(__AVX512F__)
  for (; past && i + 16 <= n; i += 16) {
    _mm512_stream_ps(to + i, _mm512_add_ps(_mm512_load_ps(x + i), _mm512_load_ps(y + i)));
  }
#elif defined(__AVX2__)
  for (; past && i + 8 <= n; i += 8) {
    _mm256_stream_ps(to + i, _mm256_add_ps(_mm256_load_ps(x + i), _mm256_load_ps(y + i)));
  }
#endif
#if defined(__SSE2__)
  if (past) _mm_sfence();
#endif
  for (; i < n; ++i) to[i] = x[i] + y[i];
}

static void sum_bfloat16(void* out, const void* a, const void* b, size_t bytes, int past) {
  uint16_t* restrict to = out;
  const uint16_t* restrict x = a, * restrict y = b;
  size_t i = 0, n = bytes / 2;
#if defined(__AVX512BF16__)
  // Even elements, then odd ones, as the conversion puts its operands one after the other.
  uint16_t order[32];
  for (int k = 0; k < 32; ++k) order[k] = (uint16_t)(k / 2 + k % 2 * 16);
  const __m512i interleave = _mm512_loadu_si512(order);
  const __m512i odd = _mm512_set1_epi32((int)0xffff0000u);
  for (; i + 32 <= n; i += 32) {
    const __m512i v = _mm512_load_si512(x + i), w = _mm512_load_si512(y + i);
    const __m512 evens = _mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
                                       _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)));
    const __m512 odds = _mm512_add_ps(_mm512_castsi512_ps(_mm512_and_si512(v, odd)),
                                      _mm512_castsi512_ps(_mm512_and_si512(w, odd)));
    const __m512i sum =
        _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(odds, evens));
    if (past) {
      _mm512_stream_si512((void*)(to + i), sum);
    } else {
      _mm512_store_si512(to + i, sum);
    }
  }
  if (past) _mm_sfence();
#else
  (void)past;
#endif
  for (; i < n; ++i) {
    const float sum = from_bf16(x[i]) + from_bf16(y[i]);
    uint32_t bits;
    memcpy(&bits, &sum, 4);
    to[i] = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

#if defined(__F16C__)
static void sum_float16(void* out, const void* a, const void* b, size_t bytes, int past) {
  uint16_t* restrict to = out;
  const uint16_t* restrict x = a, * restrict y = b;
  size_t i = 0, n = bytes / 2;
  for (; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_cvtph_ps(_mm_load_si128((const __m128i*)(x + i)));
    const __m256 w = _mm256_cvtph_ps(_mm_load_si128((const __m128i*)(y + i)));
    const __m128i sum = _mm256_cvtps_ph(_mm256_add_ps(v, w), _MM_FROUND_TO_NEAREST_INT);
    if (past) {
      _mm_stream_si128((__m128i*)(to + i), sum);
    } else {
      _mm_store_si128((__m128i*)(to + i), sum);
    }
  }
  if (past) _mm_sfence();
  for (; i < n; ++i) {
    to[i] = _cvtss_sh(_cvtsh_ss(x[i]) + _cvtsh_ss(y[i]), _MM_FROUND_TO_NEAREST_INT);
  }
}
#endif

/*! \brief NULL where there is no code for the type. */
static Sum sum_of(const char* dtype) {
  if (strcmp(dtype, "float32") == 0) return sum_float32;
  if (strcmp(dtype, "bfloat16") == 0) return sum_bfloat16;
#if defined(__F16C__)
  if (strcmp(dtype, "float16") == 0) return sum_float16;
#endif
  return NULL;
}

/*! \brief A small integer in a type, or an element as a number. */
static void put(void* data, const char* dtype, size_t i, float value) {
  if (strcmp(dtype, "float32") == 0) {
    ((float*)data)[i] = value;
  } else if (strcmp(dtype, "bfloat16") == 0) {
    ((uint16_t*)data)[i] = to_bf16(value);
#if defined(__F16C__)
  } else {
    ((uint16_t*)data)[i] = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#endif
  }
}

static float get(const void* data, const char* dtype, size_t i) {
  if (strcmp(dtype, "float32") == 0) return ((const float*)data)[i];
  if (strcmp(dtype, "bfloat16") == 0) return from_bf16(((const uint16_t*)data)[i]);
#if defined(__F16C__)
  return _cvtsh_ss(((const uint16_t*)data)[i]);
#endif
  return 0;
}

/*! \brief Two ranks' inputs, and how many barriers each of them has reached. */
struct Shared {
  volatile uint32_t* reached[2];
  void* input[2];
};

static void attach(struct Shared* shared, int fd, size_t bytes) {
  char* base =
      mmap(NULL, 2 * bytes + 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (base == MAP_FAILED) exit(1);
  for (int i = 0; i < 2; ++i) {
    shared->reached[i] = (volatile uint32_t*)(base + 256 * i);
    shared->input[i] = base + 4096 + (size_t)i * bytes;
  }
}

static void meet_peer(struct Shared* shared, int rank) {
  const uint32_t step = *shared->reached[rank] + 1;
  __atomic_store_n(shared->reached[rank], step, __ATOMIC_RELEASE);
  while ((int32_t)(__atomic_load_n(shared->reached[1 - rank], __ATOMIC_ACQUIRE) - step) < 0) {
  }
}

/*! \brief One all-reduce. */
static void one_shot(struct Shared* shared, int rank, Sum sum, void* out, size_t bytes) {
  meet_peer(shared, rank);
  sum(out, shared->input[0], shared->input[1], bytes, bytes >= kStreamBytes);
  meet_peer(shared, rank);
}

static int right(struct Shared* shared, int rank, const char* dtype, size_t count, void* out,
                 size_t bytes) {
  for (size_t i = 0; i < count; ++i) put(shared->input[rank], dtype, i, term(i, rank));
  one_shot(shared, rank, sum_of(dtype), out, bytes);
  for (size_t i = 0; i < count; ++i) {
    if (get(out, dtype, i) != expected(i, 2)) return 0;
  }
  return 1;
}

int main(int argc, char** argv) {
  if (argc != 4 && argc != 6) return 2;
  const char* mode = argv[3];
  const int bare = strcmp(mode, "oneshot") == 0;
  const int rank = atoi(argv[2]);
  struct Shared shared;
  if (argc == 6) attach(&shared, atoi(argv[4]), strtoul(argv[5], NULL, 10));
  int link = meet(argv[1], rank);
  FILE* commands = fdopen(link, "r");
  void *a = NULL, *b = NULL, *out = NULL;
  char line[128], dtype[32] = "";
  unsigned long count;
  long iterations;
  size_t bytes = 0;
  int rewriting;
  while (fgets(line, sizeof(line), commands)) {
    if (sscanf(line, "prepare %31s %lu", dtype, &count) == 2) {
      bytes = count * (strcmp(dtype, "float32") == 0 ? 4 : 2);
      free(a), free(b), free(out);
      a = buffer(bytes), b = buffer(bytes), out = buffer(bytes);
      rewrite(a, bytes, 1), rewrite(b, bytes, 2), rewrite(out, bytes, 0);
      if (bare && sum_of(dtype) == NULL) {
        dprintf(link, "unsupported\n");
      } else {
        dprintf(link, !bare || right(&shared, rank, dtype, count, out, bytes) ? "ok\n" : "bad\n");
      }
    } else if (sscanf(line, "run %ld %d", &iterations, &rewriting) == 2) {
      void* input = bare ? shared.input[rank] : a;
      const Sum sum = sum_of(dtype);
      if (bare) meet_peer(&shared, rank);
      double start = now();
      for (long i = 0; i < iterations; ++i) {
        if (rewriting) rewrite(input, bytes, (float)(i & 1));
        if (bare) {
          one_shot(&shared, rank, sum, out, bytes);
        } else if (mode[0] == 'c') {
          memcpy(out, a, bytes);
        } else {
          sum_float32(out, a, b, bytes, mode[0] == 's');
        }
        __asm__ volatile("" ::: "memory");  // every round has to happen
      }
      dprintf(link, "%.9f\n", now() - start);
    }
  }
  return 0;
}
