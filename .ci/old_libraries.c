/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file old_libraries.c
 * \brief For wheels: what headers of newer C libraries call, and version 2.28 does not have under
 *        this name. Nothing of it is seen outside of the library that it is linked into.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>

#pragma GCC visibility push(hidden)

/* 2.32: whether the process has one thread, so that counts of references need no atomics. */
char __libc_single_threaded = 0;

/* 2.33: until then each program had it of its own, which called this. */
extern int __fxstat(int version, int file, struct stat* status)
    __attribute__((visibility("default")));
int fstat(int file, struct stat* status) {
#ifdef __x86_64__
  return __fxstat(1, file, status);
#else
  return __fxstat(0, file, status);
#endif
}

/* 2.30: waits by the monotonic clock. Until then libstdc++ did it like this, and whoever waits
 * looks whether its time has come when it wakes, and waits on.
 */
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  struct timespec now, end;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += until->tv_sec - now.tv_sec;
  end.tv_nsec += until->tv_nsec - now.tv_nsec;
  while (end.tv_nsec < 0) end.tv_nsec += 1000000000, --end.tv_sec;
  while (end.tv_nsec >= 1000000000) end.tv_nsec -= 1000000000, ++end.tv_sec;
  return pthread_cond_timedwait(condition, mutex, &end);
}

#pragma GCC visibility pop
