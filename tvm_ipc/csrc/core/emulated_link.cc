/* SPDX-License-Identifier: Apache-2.0 */
/*! \file emulated_link.cc */
#include "core/emulated_link.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <ctime>

#include "core/error.h"

namespace tvm_ipc {

namespace {

constexpr int64_t kSecond = 1000000000;
/*! \brief Limits times to avoid an overflow; longer than anyone waits. */
constexpr double kMostSeconds = 1e9;

int64_t Nanoseconds(double seconds) {
  return static_cast<int64_t>(std::min(seconds, kMostSeconds) * static_cast<double>(kSecond));
}

void SleepUntil(int64_t time) {
  // A sleep whose time is already over may still yield the core, so avoid it.
  if (time <= EmulatedLink::Now()) return;
  thread_local const int precise = prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  (void)precise;  // if prctl is refused, sleeps are 50 us longer
  timespec end;
  end.tv_sec = time / kSecond;
  end.tv_nsec = time % kSecond;
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, nullptr) == EINTR) {
  }
}

}  // namespace

void EmulatedLink::Set(double latency, double bandwidth, double jitter) {
  for (double value : {latency, bandwidth, jitter}) {
    if (!(value >= 0) || std::isinf(value)) {
      Fail(kind::kValue, "emulate_link: latency, bandwidth and jitter are numbers from 0 on, not ",
           value);
    }
  }
  latency_ = latency;
  seconds_per_byte_ = bandwidth == 0 ? 0 : 1 / bandwidth;
  jitter_ = jitter;
  if (std::lock_guard<std::mutex> lock(mutex_); true) free_ = 0;
  on_.store(latency > 0 || bandwidth > 0 || jitter > 0, std::memory_order_release);
}

double EmulatedLink::Jitter() {
  // A pseudo-random number that is the same in every run: steps of the golden ratio modulo 1.
  const uint64_t drawn = drawn_.fetch_add(0x9e3779b97f4a7c15u, std::memory_order_relaxed);
  return jitter_ * (static_cast<double>(drawn >> 11) / 9007199254740992.0);
}

void EmulatedLink::Travel(size_t bytes) {
  SleepUntil(Now() +
             Nanoseconds(latency_ + seconds_per_byte_ * static_cast<double>(bytes) + Jitter()));
}

void EmulatedLink::Arrive(size_t bytes, int64_t exposed) {
  int64_t left = 0;
  if (std::lock_guard<std::mutex> lock(mutex_); true) {
    left = std::max(exposed, free_) + Nanoseconds(seconds_per_byte_ * static_cast<double>(bytes));
    free_ = left;
  }
  SleepUntil(left + Nanoseconds(latency_ + Jitter()));
}

int64_t EmulatedLink::Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

}  // namespace tvm_ipc
