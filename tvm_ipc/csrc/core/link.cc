/* SPDX-License-Identifier: Apache-2.0 */
/*! \file link.cc */
#include "core/link.h"

#include <sys/prctl.h>

#include <cerrno>
#include <cmath>
#include <ctime>

#include "core/error.h"

namespace tvm_ipc {

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
  on_.store(latency > 0 || bandwidth > 0 || jitter > 0, std::memory_order_release);
}

void EmulatedLink::Travel(size_t bytes) {
  // A number that looks random and is the same in every run: golden ratio steps through [0, 1).
  const uint64_t drawn = drawn_.fetch_add(0x9e3779b97f4a7c15u, std::memory_order_relaxed);
  const double seconds = latency_ + seconds_per_byte_ * static_cast<double>(bytes) +
                         jitter_ * (static_cast<double>(drawn >> 11) / 9007199254740992.0);
  thread_local const int precise = prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  (void)precise;  // where that is refused, sleeps are 50 us longer
  timespec end;
  clock_gettime(CLOCK_MONOTONIC, &end);
  const double whole = std::floor(seconds);
  end.tv_sec += static_cast<time_t>(whole);
  end.tv_nsec += static_cast<long>((seconds - whole) * 1e9);
  if (end.tv_nsec >= 1000000000) {
    end.tv_nsec -= 1000000000;
    ++end.tv_sec;
  }
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, nullptr) == EINTR) {
  }
}

}  // namespace tvm_ipc
