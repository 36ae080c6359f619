// SPDX-License-Identifier: Apache-2.0
/*!
 * \file peer.h
 * \brief What the C programs of the benchmark share: the line protocol with the controller, the
 *        clock, and the closed form that inputs and results follow.
 *
 * Each rank connects to the controller's Unix socket and says "rank pid". Between commands it
 * sleeps in read(), so that an idle peer costs the others nothing. Commands:
 *   prepare DTYPE COUNT    buffers, one checked all-reduce       -> ok | bad | unsupported
 *   run ITERATIONS REWRITE barrier, timed loop                   -> seconds
 */
#ifndef TVM_IPC_BENCHMARKS_PEER_H_
#define TVM_IPC_BENCHMARKS_PEER_H_

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static inline double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/*! \brief Connects to the controller and introduces this rank; answers go out by dprintf. */
static inline int meet(const char* path, int rank) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (fd < 0 || connect(fd, (struct sockaddr*)&address, sizeof(address)) != 0) {
    perror("controller");
    exit(1);
  }
  dprintf(fd, "%d %ld\n", rank, (long)getpid());
  return fd;
}

static inline void* buffer(size_t bytes) {
  void* memory = NULL;
  // The alignment of our arena's allocations.
  if (posix_memalign(&memory, 256, bytes ? bytes : 1) != 0) abort();
  return memory;
}

/*! \brief Small integers: sums over 64 ranks of them are exact in fp32, over 8 in bf16 too. */
static inline float term(size_t i, int rank) { return (float)(i % 13 + (size_t)rank); }

static inline float expected(size_t i, int ranks) {
  return (float)((size_t)ranks * (i % 13) + (size_t)(ranks * (ranks - 1) / 2));
}

static inline uint16_t to_bf16(float value) {  // exact for the values above
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)(bits >> 16);
}

static inline float from_bf16(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

/*! \brief What a producer does before a collective: ordinary stores to all of the input. */
static inline void rewrite(float* data, size_t bytes, float value) {
  for (size_t i = 0; i < bytes / 4; ++i) data[i] = value;
}

#endif  // TVM_IPC_BENCHMARKS_PEER_H_
