/* SPDX-License-Identifier: Apache-2.0 */
/*! \file compute_streams.cc */
#include "driver/compute_streams.h"

#include "core/communication_backend.h"
#include "core/current_stream_hooks.h"
#include "core/error.h"

namespace tvm_ipc::cuda {

namespace {

void RequireStreamNumber(const char* operation, int64_t number) {
  if (number >= 0 && number < kMaxStreams) return;
  Fail(kind::kValue, operation, ": stream is ", number, "; expected 0 to ", kMaxStreams - 1);
}

}  // namespace

void ComputeStreams::Use(int64_t number) {
  RequireStreamNumber("set_stream", number);
  const Here here(*device_);
  RequireNoCapture("set_stream");
  std::lock_guard<std::mutex> lock(mutex_);
  const std::thread::id thread = std::this_thread::get_id();
  if (number == 0 && bases_.count(thread) == 0) return;
  bases_.emplace(thread, ProgramStream(*device_));
  Stream const stream = Find(number);
  if (number == 0) {
    bases_.erase(thread);
  } else {
    used_.insert(number);
  }
  ProgramStreams().use(kDeviceType, device_->ordinal(), stream);
}

void ComputeStreams::Await(int64_t number) {
  RequireStreamNumber("wait_stream", number);
  const Here here(*device_);
  RequireNoCapture("wait_stream");
  std::lock_guard<std::mutex> lock(mutex_);
  AwaitLocked(Find(number));
}

void ComputeStreams::AwaitAll() {
  const Here here(*device_);
  std::lock_guard<std::mutex> lock(mutex_);
  for (const int64_t number : used_) AwaitLocked(Find(number));
  if (bases_.empty()) used_.clear();
}

bool ComputeStreams::Leave() {
  if (std::lock_guard<std::mutex> lock(mutex_); used_.empty()) return false;
  bool away = false;
  if (std::lock_guard<std::mutex> lock(mutex_); true) {
    const auto base = bases_.find(std::this_thread::get_id());
    away = base != bases_.end();
    if (away) {
      ProgramStreams().use(kDeviceType, device_->ordinal(), base->second);
      bases_.erase(base);
    }
  }
  AwaitAll();
  return away;
}

Stream ComputeStreams::Find(int64_t number) {
  if (number == 0) {
    const auto base = bases_.find(std::this_thread::get_id());
    return base != bases_.end() ? base->second : ProgramStream(*device_);
  }
  std::unique_ptr<OwnStream>& stream = streams_[number];
  if (stream == nullptr) stream = std::make_unique<OwnStream>(device_);
  return stream->get();
}

void ComputeStreams::AwaitLocked(Stream other) {
  Stream const current = ProgramStream(*device_);
  if (other == current) return;
  // A later record does not move the point that earlier waits are for.
  if (event_ == nullptr) event_ = std::make_unique<OwnEvent>(device_);
  event_->Record(other);
  event_->Await(current);
}

void ComputeStreams::RequireNoCapture(const char* operation) const {
  if (!IsCapturing(*device_, ProgramStream(*device_))) return;
  Fail(kind::kRuntime, operation,
       ": a CUDA graph is being captured; keep set_stream and wait_stream out of what is captured");
}

}  // namespace tvm_ipc::cuda
