/* SPDX-License-Identifier: Apache-2.0 */
/*! \file works.cc */
#include "core/works.h"

#include <chrono>
#include <numeric>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "core/error.h"
#include "core/group.h"
#include "core/process.h"
#include "core/teams.h"

namespace tvm_ipc {

namespace {

thread_local Works* works_of_thread = nullptr;

/*! \brief The end of a work needs no deadline of its own: what it waits for has one. */
void WaitUntil(const std::atomic<uint32_t>& word, uint32_t step, std::atomic<uint32_t>& sleepers,
               const std::atomic<uint32_t>& stop) {
  while (WaitFor(word, step, sleepers, stop, kWaitOfWorks, std::chrono::hours(1)) ==
         WaitResult::kDeadline) {
  }
}

}  // namespace

/*! \brief A work of the thread. */
class WorksOfThread::One final : public Work {
 public:
  void Wait() final {
    static const std::atomic<uint32_t> never{0};
    WaitUntil(ended_, 1, sleepers_, never);
    if (failed_) FailWork(name_);
  }

 private:
  friend class WorksOfThread;
  std::string name_;
  std::function<bool()> operation_;
  uint32_t generation_ = 0;
  bool failed_ = false;
  /*! \brief 1 when it has ended; what it wrote is seen by whoever sees that. */
  std::atomic<uint32_t> ended_{0};
  std::atomic<uint32_t> sleepers_{0};
};

std::unique_ptr<Works> Endpoint::MakeWorks() { return nullptr; }

void Work::FailWork(const std::string& name) {
  Fail(kind::kPeer, name, ", which was posted, did not end well; what went wrong has been told");
}

Works* Works::OfThisThread() { return works_of_thread; }

Works::Doing::Doing(Works& works) { works_of_thread = &works; }
Works::Doing::~Doing() { works_of_thread = nullptr; }

WorksOfThread::WorksOfThread(Rank& rank) : Works(rank) {
  rank.Share();
  BlockSignals blocked;  // the new thread keeps them blocked: they are for the program's
  thread_ = std::thread([this] { Run(); });
}

WorksOfThread::~WorksOfThread() {
  if (rank_.forked()) {
    thread_.detach();  // it is a thread of the parent
    return;
  }
  stop_.store(1, std::memory_order_seq_cst);
  WakeAll(count_);
  thread_.join();
}

std::shared_ptr<Work> WorksOfThread::Post(std::string name, std::function<bool()> operation) {
  auto work = std::make_shared<One>();
  work->name_ = std::move(name);
  work->operation_ = std::move(operation);
  work->generation_ = rank_.CheckSession();
  std::lock_guard<std::mutex> lock(mutex_);
  posted_.push_back(work);
  last_ = work;
  Publish(count_, count_.load(std::memory_order_relaxed) + 1, sleepers_);
  return work;
}

void WorksOfThread::Drain() {
  std::shared_ptr<One> last;
  if (std::lock_guard<std::mutex> lock(mutex_); true) last = last_;
  if (last == nullptr) return;
  static const std::atomic<uint32_t> never{0};
  WaitUntil(last->ended_, 1, last->sleepers_, never);
}

TeamId Works::TeamFor(TeamId team) {
  auto known = teams_.find(team);
  if (known != teams_.end()) return known->second;
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
    return team;  // there is none, as the operation will say
  }
  return teams_[team] = TeamOf(rank_, ranks, copy | kCopiesOfWorks);
}

void WorksOfThread::Run() {
  const Doing doing(*this);
  for (uint32_t next = 1;; ++next) {
    WaitUntil(count_, next, sleepers_, stop_);
    std::shared_ptr<One> work;
    if (std::lock_guard<std::mutex> lock(mutex_); true) {
      if (posted_.empty()) return;  // it was told to stop
      work = std::move(posted_.front());
      posted_.pop_front();
    }
    Do(*work);
  }
}

void WorksOfThread::Do(One& work) {
  // The rank ends this thread before it ends itself, so the thread need not keep it.
  ActFor(std::shared_ptr<Rank>(std::shared_ptr<void>(), &rank_));
  const Control& control = rank_.control();
  const bool starts = control.abort.load(std::memory_order_acquire) == 0 &&
                      control.generation.load(std::memory_order_acquire) == work.generation_;
  work.failed_ = !starts || !work.operation_();
  work.operation_ = nullptr;  // what it holds ends here, and not with whoever keeps the work
  StopActing();
  Publish(work.ended_, 1, work.sleepers_);
}

}  // namespace tvm_ipc
