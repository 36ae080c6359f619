/* SPDX-License-Identifier: Apache-2.0 */
/*! \file in_flight_ops.cc */
#include "nccl/in_flight_ops.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "core/collective_step_barrier.h"

namespace tvm_ipc::nccl {

namespace {

/*! \brief The number of operations in flight of all ranks of this process. */
std::atomic<int64_t> in_process{0};

}  // namespace

Events::~Events() {
  if (free_.empty() || device_->in_forked_child()) return;
  // If the driver has already shut down, at the end of the process, these calls fail harmlessly.
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

InFlightOps::EnqueueScope::EnqueueScope() { in_process.fetch_add(1, std::memory_order_acq_rel); }
InFlightOps::EnqueueScope::~EnqueueScope() { in_process.fetch_sub(1, std::memory_order_acq_rel); }

InFlightOps::~InFlightOps() { Clear(); }

void InFlightOps::Count() {
  const int64_t now = static_cast<int64_t>(in_flight_ops_.size());
  in_process.fetch_add(now - std::exchange(counted_, now), std::memory_order_acq_rel);
}

bool InFlightOps::AwaitProcess(std::chrono::nanoseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (in_process.load(std::memory_order_acquire) > 0) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

void InFlightOps::Add(InFlightOp in_flight_op) {
  std::lock_guard<std::mutex> lock(mutex_);
  in_flight_ops_.push_back(std::move(in_flight_op));
  Count();
}

void InFlightOps::Enqueued(const Events::Shared& begin, const Events::Shared& end) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (InFlightOp& in_flight_op : in_flight_ops_) {
    if (in_flight_op.begin == begin) in_flight_op.end = end;
  }
}

void InFlightOps::Drop(const Events::Shared& begin) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto is_it = [&](const InFlightOp& in_flight_op) { return in_flight_op.begin == begin; };
  in_flight_ops_.erase(std::remove_if(in_flight_ops_.begin(), in_flight_ops_.end(), is_it),
                       in_flight_ops_.end());
  Count();
}

InFlightOps::Found InFlightOps::Look(std::chrono::nanoseconds deadline) {
  const auto now = std::chrono::steady_clock::now();
  std::lock_guard<std::mutex> lock(mutex_);
  Found found;
  // Query each stream only up to its first unfinished operation: the later ones cannot be finished.
  std::vector<cuda::Stream> waiting;
  auto done = [&](InFlightOp& in_flight_op) {
    if (std::find(waiting.begin(), waiting.end(), in_flight_op.stream) != waiting.end())
      return false;
    const bool enqueued = in_flight_op.end != nullptr;
    const cuda::Status status =
        enqueued ? driver_.cuEventQuery.Try(*in_flight_op.end) : cuda::Status{cuda::kNotReady};
    if (status == cuda::kSuccess) return true;
    waiting.push_back(in_flight_op.stream);
    State state = State::kPending;
    if (!enqueued) {
      state = State::kEnqueuing;
    } else if (status != cuda::kNotReady) {
      state = State::kBroken;
    } else if (!in_flight_op.begun &&
               driver_.cuEventQuery.Try(*in_flight_op.begin) == cuda::kSuccess) {
      in_flight_op.begun = true;
      in_flight_op.since = now;
    } else if (in_flight_op.begun && now - in_flight_op.since > deadline) {
      state = State::kLate;
    }
    if (state > found.state) {
      found.state = state;
      found.what = Describe(in_flight_op.descriptor) + in_flight_op.where;
      found.status = status;
    }
    return false;
  };
  in_flight_ops_.erase(std::remove_if(in_flight_ops_.begin(), in_flight_ops_.end(), done),
                       in_flight_ops_.end());
  Count();
  return found;
}

void InFlightOps::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  in_flight_ops_.clear();
  Count();
}

void InFlightOps::Close() {
  Clear();
  events_.reset();
}

}  // namespace tvm_ipc::nccl
