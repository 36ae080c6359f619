/* SPDX-License-Identifier: Apache-2.0 */
/*! \file flights.cc */
#include "nccl/flights.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "core/meeting.h"

namespace tvm_ipc::nccl {

namespace {

/*! \brief Of all ranks of this process: how many they have. */
std::atomic<int64_t> in_process{0};

}  // namespace

Events::~Events() {
  if (free_.empty() || device_->forked()) return;
  // The driver may have ended before, with the process: then nothing is done, or fails.
  for (cuda::Event event : free_) device_->driver().cuEventDestroy_v2.Try(event);
}

Events::Shared Events::Record(const std::shared_ptr<Events>& events, cuda::Stream stream) {
  const cuda::Driver& driver = events->device_->driver();
  cuda::Event event = nullptr;
  if (std::lock_guard<std::mutex> lock(events->mutex_); !events->free_.empty()) {
    event = events->free_.back();
    events->free_.pop_back();
  }
  if (event == nullptr) {
    driver.cuEventCreate("to follow what a device does", &event, cuda::kWithoutTiming);
  }
  Shared shared(new cuda::Event(event), [events](cuda::Event* last) {
    std::lock_guard<std::mutex> lock(events->mutex_);
    events->free_.push_back(*last);
    delete last;
  });
  driver.cuEventRecord("to follow what a device does", event, stream);
  return shared;
}

Flights::Coming::Coming() { in_process.fetch_add(1, std::memory_order_acq_rel); }
Flights::Coming::~Coming() { in_process.fetch_sub(1, std::memory_order_acq_rel); }

Flights::~Flights() { Clear(); }

void Flights::Count() {
  const int64_t now = static_cast<int64_t>(flights_.size());
  in_process.fetch_add(now - std::exchange(counted_, now), std::memory_order_acq_rel);
}

bool Flights::AwaitProcess(std::chrono::nanoseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (in_process.load(std::memory_order_acquire) > 0) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

void Flights::Add(Flight flight) {
  std::lock_guard<std::mutex> lock(mutex_);
  flights_.push_back(std::move(flight));
  Count();
}

void Flights::Enqueued(const Events::Shared& begin, const Events::Shared& end) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Flight& flight : flights_) {
    if (flight.begin == begin) flight.end = end;
  }
}

void Flights::Drop(const Events::Shared& begin) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto is_it = [&](const Flight& flight) { return flight.begin == begin; };
  flights_.erase(std::remove_if(flights_.begin(), flights_.end(), is_it), flights_.end());
  Count();
}

Flights::Found Flights::Look(std::chrono::nanoseconds deadline) {
  const auto now = std::chrono::steady_clock::now();
  std::lock_guard<std::mutex> lock(mutex_);
  Found found;
  // Behind one that is not done, nothing of its stream is; so a look takes few questions.
  std::vector<cuda::Stream> waiting;
  auto done = [&](Flight& flight) {
    if (std::find(waiting.begin(), waiting.end(), flight.stream) != waiting.end()) return false;
    const bool enqueued = flight.end != nullptr;
    const cuda::Status status =
        enqueued ? driver_.cuEventQuery.Try(*flight.end) : cuda::Status{cuda::kNotReady};
    if (status == cuda::kSuccess) return true;
    waiting.push_back(flight.stream);
    State state = State::kPending;
    if (!enqueued) {
      state = State::kEnqueuing;
    } else if (status != cuda::kNotReady) {
      state = State::kBroken;
    } else if (!flight.begun && driver_.cuEventQuery.Try(*flight.begin) == cuda::kSuccess) {
      flight.begun = true;
      flight.since = now;
    } else if (flight.begun && now - flight.since > deadline) {
      state = State::kLate;
    }
    if (state > found.state) {
      found.state = state;
      found.what = Describe(flight.descriptor) + flight.where;
      found.status = status;
    }
    return false;
  };
  flights_.erase(std::remove_if(flights_.begin(), flights_.end(), done), flights_.end());
  Count();
  return found;
}

void Flights::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  flights_.clear();
  Count();
}

void Flights::Close() {
  Clear();
  events_.reset();
}

}  // namespace tvm_ipc::nccl
