/* SPDX-License-Identifier: Apache-2.0 */
/*! \file engine.cc */
#include "engine/engine.h"

#include <sched.h>

#include <algorithm>
#include <vector>

#include "engine/turns.h"

namespace tvm_ipc::engine {

namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

/*! \brief The most messages that are taken at a time. */
constexpr size_t kMost = 256;
/*! \brief For how long the processor is given to others and back while nothing moves. */
constexpr microseconds kYields{500};
constexpr microseconds kShortestSleep{20};
constexpr microseconds kLongestSleep{500};
constexpr microseconds kLongestNap{200};
/*! \brief How often somebody who has nothing to do looks whether to stop. */
constexpr std::chrono::seconds kRound{1};

}  // namespace

bool Pauses::Long() {
  const auto now = steady_clock::now();
  if (!still_) since_ = now;
  still_ = true;
  still_for_ = now - since_;
  return still_for_ >= kYields;
}

void Pauses::Pause(const std::function<void(Nanoseconds)>& sleep) {
  if (!Long()) {
    sched_yield();
    return;
  }
  sleep(std::clamp<Nanoseconds>(still_for_ / 16, kShortestSleep, kLongestSleep));
}

void Naps::Ended() {
  const auto now = steady_clock::now();
  if (known_) {
    const Nanoseconds since = now - last_;
    between_ += between_.count() == 0 ? since : (since - between_) / 8;
  }
  known_ = true;
  last_ = now;
}

Naps::Nanoseconds Naps::Length() const {
  const Nanoseconds length = std::min<Nanoseconds>(between_ / 4, kLongestNap);
  return length < kShortestSleep ? Nanoseconds(0) : length;
}

void Serve(EngineWire& wire, Transport& transport, const std::atomic<bool>& stopped) {
  std::vector<WireWork> works(kMost);
  std::vector<Ended> ended;
  Turns turns;
  Pauses pauses;
  Naps naps;
  const auto sleep = [&](Pauses::Nanoseconds most) { wire.Sleep(most); };
  uint32_t flushed = wire.flushed();  // nobody else sets it
  while (!stopped.load(std::memory_order_acquire)) {
    while (wire.generation() != flushed) {
      if (!transport.Flush(flushed + 1, stopped)) return;
      turns.Clear();
      wire.Flushed(++flushed);
    }
    const size_t count = wire.Take(works.data(), kMost);
    for (size_t i = 0; i < count; ++i) {
      if (turns.Starts(works[i])) transport.Start(works[i]);
    }
    ended.clear();
    if (transport.busy() != 0) transport.Progress(&ended);
    for (const Ended& one : ended) {
      WireWork next;
      if (turns.Next(one, &next)) transport.Start(next);
      wire.Done(one.rank, one.request, one.came);
    }
    const bool unhurried = transport.busy() != 0 && transport.in_turn() == transport.busy();
    if (!unhurried) {
      naps.Interrupted();
    } else if (!ended.empty()) {
      naps.Ended();
    }
    if (unhurried && ended.empty() && naps.Length().count() != 0) {
      // Who offers the processor instead gets it back late where all of them compute.
      sleep(naps.Length());
      pauses.Moved();
    } else if (count != 0 || !ended.empty()) {
      pauses.Moved();
    } else if (transport.busy() != 0 || !pauses.Long()) {
      // Who has just got a message soon posts another.
      pauses.Pause(sleep);
    } else {
      sleep(kRound);
      pauses.Moved();
    }
  }
}

}  // namespace tvm_ipc::engine
