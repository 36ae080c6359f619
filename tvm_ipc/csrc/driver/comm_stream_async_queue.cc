/* SPDX-License-Identifier: Apache-2.0 */
/*! \file comm_stream_async_queue.cc */
#include "driver/comm_stream_async_queue.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "core/current_stream_hooks.h"
#include "core/error.h"
#include "core/rank_runtime_state.h"

namespace tvm_ipc::cuda {

namespace {

/*! \brief A scope in which the calling thread launches on another stream. */
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
       ": a CUDA graph is being captured, and requests are on a stream of their own, outside of it;"
       " keep start and wait out of what is captured");
}

}  // namespace

class StreamRequest final : public Request {
 public:
  StreamRequest(const Rank& rank, std::shared_ptr<Device> device, std::string name)
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
    if (failed_) FailRequest(name_);
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
  friend class StreamAsyncQueue;
  /*! \brief Only compared, not dereferenced, until it is known to be the calling thread's rank. */
  const Rank* rank_;
  std::shared_ptr<Device> device_;
  const std::string name_;
  const uint32_t generation_;
  bool failed_ = false;
  OwnEvent ended_;
  /*! \brief The operation, which keeps the buffers that the device reads and writes alive. */
  std::function<bool()> operation_;
};

StreamAsyncQueue::StreamAsyncQueue(Rank& rank, std::shared_ptr<Device> device,
                                   std::shared_ptr<const OwnStream> stream)
    : AsyncQueue(rank),
      device_(std::move(device)),
      stream_(std::move(stream)),
      program_event_(device_) {}

StreamAsyncQueue::~StreamAsyncQueue() {
  try {
    if (!rank_.in_forked_child()) Drain();
  } catch (const Error&) {
    // The device has failed, so nothing is running on it any more.
  }
}

std::shared_ptr<Request> StreamAsyncQueue::Start(std::string name,
                                                 std::function<bool()> operation) {
  const Here here(*device_);
  RequireNoCapture(*device_, "start");
  std::lock_guard<std::mutex> lock(mutex_);
  LetGo();
  auto request = std::make_shared<StreamRequest>(rank_, device_, std::move(name));
  program_event_.Record(ProgramStream(*device_));
  program_event_.Await(stream_->get());
  if (const OnStream on(*device_, stream_->get()); true) {
    const RunningScope doing(*this);
    request->failed_ = !operation();
  }
  request->ended_.Record(stream_->get());
  // The device uses the operation's buffers from now until the event completes.
  request->operation_ = std::move(operation);
  started_.push_back(request);
  return request;
}

bool StreamAsyncQueue::LetGo() {
  while (!started_.empty() && !started_.front()->ended_.pending()) {
    started_.front()->operation_ = nullptr;
    started_.pop_front();
  }
  return !started_.empty();
}

void StreamAsyncQueue::Drain() {
  const Here here(*device_);
  // No deadline is needed here: the kernels' own waits for peers have one.
  auto pause = std::chrono::microseconds(10);
  for (;; pause = std::min(2 * pause, std::chrono::microseconds(1000))) {
    if (std::lock_guard<std::mutex> lock(mutex_); !LetGo()) return;
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace tvm_ipc::cuda
