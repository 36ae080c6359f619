/* SPDX-License-Identifier: Apache-2.0 */
/*! \file works.cc */
#include "driver/works.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/group.h"
#include "core/streams.h"

namespace tvm_ipc::cuda {

namespace {

/*! \brief While it lives, what the calling thread starts goes to another stream. */
class OnStream {
 public:
  OnStream(const Device& device, Stream stream)
      : ordinal_(device.ordinal()), before_(ProgramStream(device)) {
    ProgramStreams().use(kDeviceType, ordinal_, stream);
  }
  ~OnStream() { ProgramStreams().use(kDeviceType, ordinal_, before_); }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  int ordinal_;
  Stream before_;
};

void RequireNoCapture(const Device& device, const char* operation) {
  if (!IsCapturing(device, ProgramStream(device))) return;
  Fail(kind::kRuntime, operation,
       ": a CUDA graph is being captured, and works are on a stream of their own, outside of it;"
       " keep post and wait out of what is captured");
}

}  // namespace

class WorkOnStream final : public Work {
 public:
  WorkOnStream(const Rank& rank, std::shared_ptr<Device> device, std::string name)
      : rank_(&rank),
        device_(std::move(device)),
        name_(std::move(name)),
        generation_(rank.CheckSession()),
        ended_(device_) {}

  void Wait() final {
    if (CurrentRank() != rank_) {
      Fail(kind::kRuntime, "wait: ", name_,
           ", which was posted, belongs to a worker for which this thread does not act");
    }
    if (failed_) FailWork(name_);
    if (rank_->CheckSession() != generation_) {
      Fail(kind::kPeer, name_,
           ", which was posted before the session recovered from an error, may be one that did not"
           " end well; what went wrong has been told");
    }
    const Here here(*device_);
    RequireNoCapture(*device_, "wait");
    ended_.Await(ProgramStream(*device_));
  }

 private:
  friend class WorksOnStream;
  /*! \brief Only compared, until it is known to be the calling thread's. */
  const Rank* rank_;
  std::shared_ptr<Device> device_;
  const std::string name_;
  const uint32_t generation_;
  bool failed_ = false;
  OwnEvent ended_;
  /*! \brief It holds what the device reads and writes. */
  std::function<bool()> operation_;
};

WorksOnStream::WorksOnStream(Rank& rank, std::shared_ptr<Device> device)
    : Works(rank), device_(std::move(device)), stream_(device_), posted_(device_) {}

WorksOnStream::~WorksOnStream() {
  try {
    if (!rank_.forked()) Drain();
  } catch (const Error&) {
    // The device does nothing any more.
  }
}

std::shared_ptr<Work> WorksOnStream::Post(std::string name, std::function<bool()> operation) {
  const Here here(*device_);
  RequireNoCapture(*device_, "post");
  std::lock_guard<std::mutex> lock(mutex_);
  LetGo();
  auto work = std::make_shared<WorkOnStream>(rank_, device_, std::move(name));
  posted_.Record(ProgramStream(*device_));
  posted_.Await(stream_.get());
  if (const OnStream on(*device_, stream_.get()); true) {
    const Doing doing(*this);
    work->failed_ = !operation();
  }
  work->ended_.Record(stream_.get());
  // What it reads and writes is used by the device, from now until it comes to that mark.
  work->operation_ = std::move(operation);
  started_.push_back(work);
  return work;
}

bool WorksOnStream::LetGo() {
  while (!started_.empty() && !started_.front()->ended_.pending()) {
    started_.front()->operation_ = nullptr;
    started_.pop_front();
  }
  return !started_.empty();
}

void WorksOnStream::Drain() {
  const Here here(*device_);
  // Kernels wait for peers with deadlines of their own.
  auto pause = std::chrono::microseconds(10);
  for (;; pause = std::min(2 * pause, std::chrono::microseconds(1000))) {
    if (std::lock_guard<std::mutex> lock(mutex_); !LetGo()) return;
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace tvm_ipc::cuda
