/* SPDX-License-Identifier: Apache-2.0 */
/*! \file internode_progress_engine.cc */
#include "engine/internode_progress_engine.h"

#include <sched.h>

#include <algorithm>
#include <vector>

#include "engine/in_flight_send_limit.h"

namespace tvm_ipc::engine {

namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

/*! \brief The maximum number of requests that are taken at a time. */
constexpr size_t kMost = 256;
/*! \brief The time to yield the processor, before sleeping, while there is no progress. */
constexpr microseconds kYields{500};
constexpr microseconds kShortestSleep{20};
constexpr microseconds kLongestSleep{500};
constexpr microseconds kLongestBackoff{200};
/*! \brief The interval at which an idle engine checks whether to stop. */
constexpr std::chrono::seconds kRound{1};

}  // namespace

bool IdleBackoff::IsLong() {
  const auto now = steady_clock::now();
  if (!still_) since_ = now;
  still_ = true;
  still_for_ = now - since_;
  return still_for_ >= kYields;
}

void IdleBackoff::Pause(const std::function<void(Nanoseconds)>& sleep) {
  if (!IsLong()) {
    sched_yield();
    return;
  }
  sleep(std::clamp<Nanoseconds>(still_for_ / 16, kShortestSleep, kLongestSleep));
}

void SequentialBackoff::Ended() {
  const auto now = steady_clock::now();
  if (known_) {
    const Nanoseconds since = now - last_;
    between_ += between_.count() == 0 ? since : (since - between_) / 8;
  }
  known_ = true;
  last_ = now;
}

SequentialBackoff::Nanoseconds SequentialBackoff::Length() const {
  const Nanoseconds length = std::min<Nanoseconds>(between_ / 4, kLongestBackoff);
  return length < kShortestSleep ? Nanoseconds(0) : length;
}

void Serve(EngineRing& ring, Transport& transport, const std::atomic<bool>& stopped) {
  std::vector<RingMessage> messages(kMost);
  std::vector<Ended> ended;
  SendScheduler scheduler;
  IdleBackoff idle_backoff;
  SequentialBackoff sequential_backoff;
  const auto sleep = [&](IdleBackoff::Nanoseconds most) { ring.Sleep(most); };
  uint32_t flushed = ring.flushed();  // nobody else sets it
  while (!stopped.load(std::memory_order_acquire)) {
    while (ring.generation() != flushed) {
      if (!transport.Flush(flushed + 1, stopped)) return;
      scheduler.Clear();
      ring.Flushed(++flushed);
    }
    const size_t count = ring.Take(messages.data(), kMost);
    for (size_t i = 0; i < count; ++i) {
      if (scheduler.Starts(messages[i])) transport.Start(messages[i]);
    }
    ended.clear();
    if (transport.in_flight() != 0) transport.Progress(&ended);
    for (const Ended& message : ended) {
      RingMessage next;
      if (scheduler.Next(message, &next)) transport.Start(next);
      ring.Done(message.rank, message.request, message.received);
    }
    const bool all_sequential =
        transport.in_flight() != 0 && transport.sequential() == transport.in_flight();
    if (!all_sequential) {
      sequential_backoff.Interrupted();
    } else if (!ended.empty()) {
      sequential_backoff.Ended();
    }
    if (all_sequential && ended.empty() && sequential_backoff.Length().count() != 0) {
      // A yield would return the processor late when all cores compute.
      sleep(sequential_backoff.Length());
      idle_backoff.Moved();
    } else if (count != 0 || !ended.empty()) {
      idle_backoff.Moved();
    } else if (transport.in_flight() != 0 || !idle_backoff.IsLong()) {
      // A rank that has just received a message will soon post another.
      idle_backoff.Pause(sleep);
    } else {
      sleep(kRound);
      idle_backoff.Moved();
    }
  }
}

}  // namespace tvm_ipc::engine
