/* SPDX-License-Identifier: Apache-2.0 */
/*! \file communicator.cc */
#include "nccl/communicator.h"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "core/collective_step_barrier.h"
#include "core/error.h"

namespace tvm_ipc::nccl {

namespace {

using Clock = std::chrono::steady_clock;

/*! \brief A backoff for polling: NCCL finishes within microseconds, or takes seconds. */
class Patience {
 public:
  void Pause() {
    if (++looks_ < 20) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::min<std::chrono::microseconds>(kLongest, looks_ * kStep));
    }
  }

 private:
  static constexpr std::chrono::microseconds kStep{5};
  static constexpr std::chrono::microseconds kLongest{2000};
  int looks_ = 0;
};

}  // namespace

Communicator::Communicator(const Limits& limits, const Words& what, int size, int place,
                           const UniqueId& id)
    : library_(TheLibrary()), limits_(limits) {
  Config config;
  config.blocking = 0;
  try {
    Result result;
    if (std::lock_guard<std::mutex> lock(mutex_); true) {
      result = library_.CommInitRankConfig(&handle_, size, id, place, &config);
    }
    if (result != kSuccess && result != kInProgress) {
      Fail(kind::kRuntime, what(), ": ", library_.CommInitRankConfig.name(), ": ",
           library_.Describe(result));
    }
    Await(what, library_.CommInitRankConfig.name());
  } catch (...) {
    End();
    throw;
  }
}

void Communicator::Enqueue(const Words& what, const Calls& calls) {
  Called last{library_.GroupEnd.name(), kSuccess};
  if (std::lock_guard<std::mutex> lock(mutex_); true) {
    if (handle_ == nullptr) FailEnded(what);
    Called first{library_.GroupStart.name(), library_.GroupStart()};
    if (first.result == kSuccess) {
      first = calls(handle_);
      // Always end the group. Otherwise the next calls of this thread would belong to it.
      last.result = library_.GroupEnd();
    }
    auto failed = [](const Called& call) {
      return call.result != kSuccess && call.result != kInProgress;
    };
    const Called& worst = failed(first) ? first : last;
    if (failed(worst)) {
      Fail(kind::kRuntime, what(), ": ", worst.name, ": ",
           library_.Describe(worst.result, handle_));
    }
  }
  if (last.result == kInProgress) Await(what, last.name);
}

void Communicator::Await(const Words& what, const char* call) {
  const auto end = Clock::now() + limits_.deadline;
  for (Patience patience;; patience.Pause()) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (handle_ == nullptr) FailEnded(what);
      Result state = kSuccess;
      const Result asked = library_.CommGetAsyncError(handle_, &state);
      if (asked != kSuccess) state = asked;
      if (state == kSuccess) return;
      if (state != kInProgress) {
        Fail(kind::kRuntime, what(), ": ", call, ": ", library_.Describe(state, handle_));
      }
    }
    if (limits_.control.abort.load(std::memory_order_acquire) != 0) FailEnded(what);
    if (Clock::now() >= end) {
      Fail(kind::kDeadline, what(), ": NCCL waited ",
           std::chrono::duration<double>(limits_.deadline).count(), " s in ", call,
           " for the other members, or for the network between them; with NCCL_DEBUG=INFO it says"
           " what it tries, NCCL_SOCKET_IFNAME names the interface, and TVM_IPC_TIMEOUT raises the"
           " timeout");
    }
  }
}

bool Communicator::Leave(std::chrono::nanoseconds patience) {
  const auto end = Clock::now() + patience;
  std::unique_lock<std::mutex> lock(mutex_);
  if (handle_ == nullptr) return false;
  Result state = library_.CommFinalize(handle_);
  for (Patience pause; state == kInProgress && Clock::now() < end; pause.Pause()) {
    const Result asked = library_.CommGetAsyncError(handle_, &state);
    if (asked != kSuccess) state = asked;
  }
  if (state != kSuccess) return false;
  const Result result = library_.CommDestroy(std::exchange(handle_, nullptr));
  return result == kSuccess || result == kInProgress;
}

void Communicator::End() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Handle handle = std::exchange(handle_, nullptr)) library_.CommAbort(handle);
}

bool Communicator::ended() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return handle_ == nullptr;
}

std::string Communicator::AsynchronousError() const {
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || handle_ == nullptr) return "";  // a thread in a call gets the error
  Result state = kSuccess;
  const Result asked = library_.CommGetAsyncError(handle_, &state);
  if (asked != kSuccess) state = asked;
  return state == kSuccess || state == kInProgress ? "" : library_.Describe(state, handle_);
}

void Communicator::FailEnded(const Words& what) const {
  Fail(kind::kPeer, what(), " was stopped: ", DescribeAbort(limits_.control));
}

}  // namespace tvm_ipc::nccl
