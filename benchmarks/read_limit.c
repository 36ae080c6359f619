// SPDX-License-Identifier: Apache-2.0
/*!
 * \file read_limit.c
 * \brief How fast cores read memory: what limits a decoder, which reads every weight for each
 *        token.
 *
 * Usage: read_limit PROCESSES MEBIBYTES ROUNDS
 *
 * So many processes, each with memory of its own, in large pages where the system has some, as the
 * workers of a session have their weights, read it from the first byte to the last, all at once,
 * and add up what they find. Prints bytes per second of all processes together, until the last one
 * has read its memory: the median over rounds, for the fastest way to read.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { kMost = 64, kLarge = 2 << 20, kSums = 4 };

/*! \brief A way to read. */
typedef struct {
  int in_order;  // of memory; otherwise from kSums places in turn
  long ahead;    // bytes from what is read to what is prefetched; 0 for no prefetching
} Way;
static const Way kWays[] = {{1, 0}, {1, 1024}, {1, 2048}, {1, 4096}, {0, 0}, {0, 384}, {0, 1024}};

/*! \brief What all processes see. */
typedef struct {
  atomic_long arrived;
  double seconds[kMost];
} Shared;

// With vectors wider than the registers, GCC keeps the sums in memory, and additions set the limit.
typedef float Vector __attribute__((vector_size(32)));

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/*! \brief The n-th time that all meet. */
static void meet(Shared* shared, long n, int processes) {
  atomic_fetch_add(&shared->arrived, 1);
  for (long i = 0; atomic_load(&shared->arrived) < n * processes; ++i) {
    if (i > 10000) sched_yield();
  }
}

/*! \brief Add vectors to kSums sums, `count` to each. The vectors of one turn are `step` bytes apart,
 *         and turns are `next` bytes apart. */
static inline void add(const char* data, size_t count, size_t step, size_t next, long ahead,
                       Vector* sums) {
  for (size_t i = 0; i < count; ++i, data += next) {
    for (size_t k = 0; k < kSums; ++k) {
      const char* p = data + k * step;
      if (ahead) __builtin_prefetch(p + ahead, 0, 2);
      sums[k] += *(const Vector*)p;
    }
  }
}

static float sum(const char* data, size_t bytes, Way way) {
  Vector sums[kSums] = {{0}};
  const size_t count = bytes / kSums / sizeof(Vector);
  const size_t step = way.in_order ? sizeof(Vector) : bytes / kSums;
  add(data, count, step, way.in_order ? kSums * sizeof(Vector) : sizeof(Vector), way.ahead, sums);
  sums[0] += sums[1] + sums[2] + sums[3];
  float result = 0;
  for (int k = 0; k < 8; ++k) result += sums[0][k];
  return result;
}

/*! \brief Stay on the core of this rank, of those that this process may use. */
static void take_core(int rank) {
  cpu_set_t all, own;
  if (sched_getaffinity(0, sizeof(all), &all) != 0) return;
  CPU_ZERO(&own);
  for (int core = 0, count = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &all) || count++ != rank % CPU_COUNT(&all)) continue;
    CPU_SET(core, &own);
    sched_setaffinity(0, sizeof(own), &own);
  }
}

static int compare(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

int main(int count, char** arguments) {
  if (count != 4) return fprintf(stderr, "read_limit PROCESSES MEBIBYTES ROUNDS\n"), 2;
  const int processes = atoi(arguments[1]), rounds = atoi(arguments[3]);
  const size_t bytes = (size_t)atol(arguments[2]) << 20;
  if (processes < 1 || processes > kMost || rounds < 1 || bytes == 0) return 2;
  Shared* shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                        -1, 0);
  if (shared == MAP_FAILED) return perror("memory"), 1;
  int rank = 0;
  while (rank + 1 < processes) {
    const pid_t child = fork();
    if (child < 0) return perror("fork"), 1;
    if (child > 0) break;
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // or it would wait for its parent for ever
    ++rank;
  }
  take_core(rank);
  char* data = mmap(NULL, bytes + kLarge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return perror("memory"), 1;
  data = (char*)(((uintptr_t)data + kLarge - 1) / kLarge * kLarge);
  madvise(data, bytes, MADV_HUGEPAGE);
  for (size_t i = 0; i < bytes / 4; ++i) ((float*)data)[i] = (float)(i % 7);
  double best = 0, *times = calloc((size_t)rounds, sizeof(double));
  volatile float kept = 0;
  long meetings = 0;
  for (size_t way = 0; way < sizeof(kWays) / sizeof(*kWays); ++way) {
    for (int round = 0; round < rounds; ++round) {
      meet(shared, ++meetings, processes);
      const double start = now();
      kept = kept + sum(data, bytes, kWays[way]);
      shared->seconds[rank] = now() - start;
      meet(shared, ++meetings, processes);
      times[round] = 0;
      for (int k = 0; k < processes; ++k) {
        if (shared->seconds[k] > times[round]) times[round] = shared->seconds[k];
      }
    }
    qsort(times, (size_t)rounds, sizeof(double), compare);
    const double rate = (double)bytes * processes / times[rounds / 2];
    if (rate > best) best = rate;
  }
  if (rank == 0) printf("%.6g\n", best);
  int status = 0;
  const int other = rank + 1 < processes && wait(&status) > 0 && status != 0;
  return other;
}
