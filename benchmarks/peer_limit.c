// SPDX-License-Identifier: Apache-2.0
/*!
 * \file peer_limit.c
 * \brief The bare memory bandwidth: every rank adds or copies private buffers, all at once, with
 *        no synchronisation at all. What no all-reduce can beat on this machine at this moment:
 *          copy    memcpy of the input to the output: the least any of them must do
 *          add     output = input + second input: a zero-copy one-shot of two ranks
 *          stream  the same with non-temporal stores
 *
 *        And what is left of that between two cores that must hear from each other:
 *          oneshot add or stream of both ranks' shared inputs between two spinning barriers,
 *                  with nothing around it: no checks, no choice, no way out of a wait
 *
 * Usage: peer_limit SOCKET RANK MODE [SHARED_MEMORY_FD BYTES_PER_RANK]
 */
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#include <sys/mman.h>

#include "peer.h"

enum { kStreamBytes = 4 << 20 };  // from here on stream is the faster one

static void add(float* restrict out, const float* restrict a, const float* restrict b, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

static void stream(float* restrict out, const float* restrict a, const float* restrict b,
                   size_t n) {
  size_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    _mm512_stream_ps(out + i, _mm512_add_ps(_mm512_load_ps(a + i), _mm512_load_ps(b + i)));
  }
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8) {
    _mm256_stream_ps(out + i, _mm256_add_ps(_mm256_load_ps(a + i), _mm256_load_ps(b + i)));
  }
#endif
#if defined(__SSE2__)
  _mm_sfence();
#endif
  add(out + i, a + i, b + i, n - i);
}

/*! \brief Two ranks' inputs, and how many barriers each of them has reached. */
struct Shared {
  volatile uint32_t* reached[2];
  float* input[2];
};

static void attach(struct Shared* shared, int fd, size_t bytes) {
  char* base =
      mmap(NULL, 2 * bytes + 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (base == MAP_FAILED) exit(1);
  for (int i = 0; i < 2; ++i) {
    shared->reached[i] = (volatile uint32_t*)(base + 256 * i);
    shared->input[i] = (float*)(base + 4096 + (size_t)i * bytes);
  }
}

static void meet_peer(struct Shared* shared, int rank) {
  const uint32_t step = *shared->reached[rank] + 1;
  __atomic_store_n(shared->reached[rank], step, __ATOMIC_RELEASE);
  while ((int32_t)(__atomic_load_n(shared->reached[1 - rank], __ATOMIC_ACQUIRE) - step) < 0) {
  }
}

int main(int argc, char** argv) {
  if (argc != 4 && argc != 6) return 2;
  const char* mode = argv[3];
  const int rank = atoi(argv[2]);
  struct Shared shared;
  if (argc == 6) attach(&shared, atoi(argv[4]), strtoul(argv[5], NULL, 10));
  int link = meet(argv[1], rank);
  FILE* commands = fdopen(link, "r");
  float *a = NULL, *b = NULL, *out = NULL;
  char line[128], dtype[32];
  unsigned long count;
  long iterations;
  size_t n = 0;
  int rewriting;
  while (fgets(line, sizeof(line), commands)) {
    if (sscanf(line, "prepare %31s %lu", dtype, &count) == 2) {
      n = count * (strcmp(dtype, "bfloat16") == 0 ? 2 : 4) / 4;
      free(a), free(b), free(out);
      a = buffer(n * 4), b = buffer(n * 4), out = buffer(n * 4);
      rewrite(a, n * 4, 1), rewrite(b, n * 4, 2), rewrite(out, n * 4, 0);
      dprintf(link, "ok\n");
    } else if (sscanf(line, "run %ld %d", &iterations, &rewriting) == 2) {
      float* input = mode[0] == 'o' ? shared.input[rank] : a;
      if (mode[0] == 'o') meet_peer(&shared, rank);
      double start = now();
      for (long i = 0; i < iterations; ++i) {
        if (rewriting) rewrite(input, n * 4, (float)(i & 1));
        if (mode[0] == 'o') {
          meet_peer(&shared, rank);
          (n * 4 < kStreamBytes ? add : stream)(out, shared.input[0], shared.input[1], n);
          meet_peer(&shared, rank);
        } else if (mode[0] == 'c') {
          memcpy(out, a, n * 4);
        } else if (mode[0] == 'a') {
          add(out, a, b, n);
        } else {
          stream(out, a, b, n);
        }
        __asm__ volatile("" ::: "memory");  // every round has to happen
      }
      dprintf(link, "%.9f\n", now() - start);
    }
  }
  return 0;
}
