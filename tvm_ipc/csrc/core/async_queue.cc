/* SPDX-License-Identifier: Apache-2.0 */
/*! \file async_queue.cc */
#include "core/async_queue.h"

#include <chrono>
#include <numeric>
#include <utility>
#include <vector>

#include "core/communication_backend.h"
#include "core/error.h"
#include "core/rank_runtime_state.h"
#include "core/teams.h"
#include "core/thread_signals.h"

namespace tvm_ipc {

namespace {

thread_local AsyncQueue* thread_async_queue = nullptr;

/*! \brief Wait without a deadline: whatever the operation itself waits for has one. */
void WaitUntil(const std::atomic<uint32_t>& word, uint32_t step, std::atomic<uint32_t>& sleepers,
               const std::atomic<uint32_t>& stop) {
  while (WaitFor(word, step, sleepers, stop, kAsyncWaitPolicy, std::chrono::hours(1)) ==
         WaitResult::kDeadline) {
  }
}

}  // namespace

/*! \brief An operation of the thread. */
class ThreadAsyncQueue::QueuedRequest final : public Request {
 public:
  void Wait() final {
    static const std::atomic<uint32_t> never{0};
    WaitUntil(ended_, 1, sleepers_, never);
    if (failed_) FailRequest(name_);
  }

 private:
  friend class ThreadAsyncQueue;
  std::string name_;
  std::function<bool()> operation_;
  uint32_t generation_ = 0;
  bool failed_ = false;
  /*! \brief 1 when it has ended; a thread that sees it also sees what the operation wrote. */
  std::atomic<uint32_t> ended_{0};
  std::atomic<uint32_t> sleepers_{0};
};

std::unique_ptr<AsyncQueue> Endpoint::MakeAsyncQueue() { return nullptr; }

void Request::FailRequest(const std::string& name) {
  Fail(kind::kPeer, name, ", which was started asynchronously, failed; its own error was reported");
}

AsyncQueue* AsyncQueue::OfThisThread() { return thread_async_queue; }

AsyncQueue::RunningScope::RunningScope(AsyncQueue& async_queue) {
  thread_async_queue = &async_queue;
}
AsyncQueue::RunningScope::~RunningScope() { thread_async_queue = nullptr; }

ThreadAsyncQueue::ThreadAsyncQueue(Rank& rank) : AsyncQueue(rank) {
  rank.Share();
  BlockSignals blocked;  // the new thread inherits the mask: signals are for the program's threads
  thread_ = std::thread([this] { Run(); });
}

ThreadAsyncQueue::~ThreadAsyncQueue() {
  if (rank_.in_forked_child()) {
    thread_.detach();  // it is a thread of the parent
    return;
  }
  stop_.store(1, std::memory_order_seq_cst);
  WakeAll(count_);
  thread_.join();
}

std::shared_ptr<Request> ThreadAsyncQueue::Start(std::string name,
                                                 std::function<bool()> operation) {
  auto request = std::make_shared<QueuedRequest>();
  request->name_ = std::move(name);
  request->operation_ = std::move(operation);
  request->generation_ = rank_.CheckSession();
  std::lock_guard<std::mutex> lock(mutex_);
  queued_.push_back(request);
  last_ = request;
  Publish(count_, count_.load(std::memory_order_relaxed) + 1, sleepers_);
  return request;
}

void ThreadAsyncQueue::Drain() {
  std::shared_ptr<QueuedRequest> last;
  if (std::lock_guard<std::mutex> lock(mutex_); true) last = last_;
  if (last == nullptr) return;
  static const std::atomic<uint32_t> never{0};
  WaitUntil(last->ended_, 1, last->sleepers_, never);
}

TeamId AsyncQueue::TeamFor(TeamId team) {
  auto copy_of_team = teams_.find(team);
  if (copy_of_team != teams_.end()) return copy_of_team->second;
  std::vector<int> ranks;
  uint32_t copy = 0;
  if (const TeamRecord* record = FindTeam(rank_, team)) {
    ranks.assign(record->ranks, record->ranks + record->size);
    copy = record->copy;
  } else if (team == kWorld || team == kGroup) {
    const int size = team == kWorld ? rank_.num_ranks() : rank_.group_size();
    ranks.resize(size);
    std::iota(ranks.begin(), ranks.end(), rank_.id() / size * size);
  } else {
    return team;  // there is no such team; the operation reports it
  }
  return teams_[team] = TeamOf(rank_, ranks, copy | kAsyncTeamCopies);
}

void ThreadAsyncQueue::Run() {
  const RunningScope running(*this);
  for (uint32_t next = 1;; ++next) {
    WaitUntil(count_, next, sleepers_, stop_);
    std::shared_ptr<QueuedRequest> request;
    if (std::lock_guard<std::mutex> lock(mutex_); true) {
      if (queued_.empty()) return;  // stopped
      request = std::move(queued_.front());
      queued_.pop_front();
    }
    Do(*request);
  }
}

void ThreadAsyncQueue::Do(QueuedRequest& request) {
  // The rank joins this thread before it is destroyed, so the thread need not own it.
  ActFor(std::shared_ptr<Rank>(std::shared_ptr<void>(), &rank_));
  const Control& control = rank_.control();
  const bool starts = control.abort.load(std::memory_order_acquire) == 0 &&
                      control.generation.load(std::memory_order_acquire) == request.generation_;
  request.failed_ = !starts || !request.operation_();
  request.operation_ = nullptr;  // free its captures now, not with the last owner of the request
  StopActing();
  Publish(request.ended_, 1, request.sleepers_);
}

}  // namespace tvm_ipc
