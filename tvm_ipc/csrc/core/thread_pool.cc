/* SPDX-License-Identifier: Apache-2.0 */
/*! \file thread_pool.cc */
#include "core/thread_pool.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/atfork_descriptors.h"
#include "core/thread_signals.h"
#include "core/wait.h"

namespace tvm_ipc {
namespace {

// A helper without tasks spins for about 0.1 ms, and then offers its core to others before it
// sleeps: for longer than a program pauses between two steps, such as the tokens of a model, since
// a thread that wakes up may land on the core of its caller. It sleeps at once if it was delayed.
constexpr int kIdleSpins = 3000;
constexpr std::chrono::milliseconds kIdle{5};
// The caller spins while helpers end their last tasks, which are short.
constexpr int kCallerSpins = 1500;
constexpr std::chrono::hours kLongSleep{1};
// A helper that takes this much longer than two tasks has lost its core. Then the caller runs tasks
// alone, for longer each time, since the kernel gives the core back after milliseconds.
constexpr std::chrono::microseconds kDelay{150};
constexpr std::chrono::milliseconds kShortestAlone{1}, kLongestAlone{64};

/*! \brief Whether this thread runs a task. */
thread_local bool in_task = false;

}  // namespace

/*! \brief The pool of a thread. A forked child begins with another, because it has no helpers. */
struct ThreadPool::Owner {
  uint32_t generation = Generation();
  std::shared_ptr<ThreadPool> pool = std::make_shared<ThreadPool>();

  ~Owner() {
    if (generation != Generation()) return;
    pool->closed_.store(true, std::memory_order_relaxed);
    PublishOrdered(pool->launches_, pool->launches_.load(std::memory_order_relaxed) + 1,
                   pool->idle_sleepers_);
  }
};

ThreadPool& ThreadPool::OfThread() {
  thread_local std::unique_ptr<Owner> owner;
  if (owner == nullptr || owner->generation != Generation()) owner = std::make_unique<Owner>();
  return *owner->pool;
}

bool ThreadPool::TryRun(int threads, int tasks, Body body, void* data) {
  if (in_task) return false;
  const Clock::time_point start = Clock::now();
  if (start < alone_until_) return false;
  const int helpers = std::min(threads, tasks) - 1;
  StartHelpers(helpers);
  body_ = body;
  data_ = data;
  done_.store(0, std::memory_order_relaxed);
  allowed_.store(helpers, std::memory_order_relaxed);
  offer_.store(static_cast<uint64_t>(tasks) << 32, std::memory_order_release);
  if (helpers > 0) {
    if (idle_sleepers_.load(std::memory_order_relaxed) != 0) KeepFromOwnCore();
    PublishOrdered(launches_, launches_.load(std::memory_order_relaxed) + 1, idle_sleepers_);
  }
  const uint32_t own = RunTasks();
  if (own != static_cast<uint32_t>(tasks)) {
    const Clock::time_point ran = Clock::now();
    WaitForHelpers(static_cast<uint32_t>(tasks) - own);
    const Clock::time_point end = Clock::now();
    Learn((ran - start) / std::max(own, 1u), end - ran, end);
  }
  if (failed_.load(std::memory_order_relaxed)) {
    failed_.store(false, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
  return true;
}

void ThreadPool::Run(int threads, int tasks, Body body, void* data) {
  if (TryRun(threads, tasks, body, data)) return;
  for (int task = 0; task < tasks; ++task) body(task, data);
}

bool ThreadPool::Claim(uint32_t* task) {
  uint64_t offer = offer_.load(std::memory_order_acquire);
  while (static_cast<uint32_t>(offer) < offer >> 32) {
    if (offer_.compare_exchange_weak(offer, offer + 1, std::memory_order_acq_rel,
                                     std::memory_order_acquire)) {
      *task = static_cast<uint32_t>(offer);
      return true;
    }
  }
  return false;
}

uint32_t ThreadPool::RunTasks() {
  uint32_t count = 0, task;
  in_task = true;
  while (Claim(&task)) {
    try {
      body_(static_cast<int>(task), data_);
    } catch (...) {
      if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
    }
    ++count;
  }
  in_task = false;
  return count;
}

void ThreadPool::WaitForHelpers(uint32_t tasks) {
  for (int i = 0; i < kCallerSpins; ++i) {
    if (done_.load(std::memory_order_acquire) == tasks) return;
    Pause();
  }
  for (uint32_t done; (done = done_.load(std::memory_order_acquire)) != tasks;) {
    SleepOn(done_, done, caller_sleeps_, kLongSleep);
  }
}

void ThreadPool::Learn(Clock::duration each_task, Clock::duration waited, Clock::time_point now) {
  if (waited > 2 * each_task + kDelay) {
    alone_for_ = std::clamp<Clock::duration>(2 * alone_for_, kShortestAlone, kLongestAlone);
    alone_until_ = now + alone_for_;
  } else if (now > alone_until_ + alone_for_) {
    alone_for_ /= 2;
    alone_until_ = now;
  }
  calm_.store(alone_for_ < kShortestAlone, std::memory_order_relaxed);
}

void ThreadPool::StartHelpers(int helpers) {
  while (static_cast<int>(helpers_.size()) < helpers) {
    helpers_.emplace_back();
    auto help = [pool = shared_from_this(), index = static_cast<int>(helpers_.size()) - 1,
                 helper = &helpers_.back()] { pool->Help(index, helper); };
    try {
      StartThread("a thread pool", std::move(help)).detach();
    } catch (...) {
      helpers_.pop_back();
      throw;
    }
  }
}

void ThreadPool::Help(int index, Helper* helper) {
  helper->thread = static_cast<pid_t>(syscall(SYS_gettid));
  while (true) {
    const uint32_t seen = launches_.load(std::memory_order_acquire);
    if (closed_.load(std::memory_order_relaxed)) return;  // it is set before `launches_` changes
    if (index < allowed_.load(std::memory_order_relaxed)) {
      const uint32_t count = RunTasks();
      if (count > 0) {
        done_.fetch_add(count, std::memory_order_seq_cst);
        if (caller_sleeps_.load(std::memory_order_seq_cst) != 0) WakeAll(done_);
      }
    }
    AwaitLaunch(seen, helper);
  }
}

void ThreadPool::KeepFromOwnCore() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return;
  cpu_set_t others = cores;
  CPU_CLR(sched_getcpu(), &others);
  if (CPU_COUNT(&others) == 0) return;
  for (Helper& helper : helpers_) {
    // In this order: a helper that woke up clears `sleeps` before `is_limited`, and reads `cores`
    // after both.
    if (helper.is_limited.load(std::memory_order_acquire)) continue;
    if (!helper.sleeps.load(std::memory_order_acquire)) continue;
    helper.cores = cores;
    helper.is_limited.store(true, std::memory_order_release);
    sched_setaffinity(helper.thread, sizeof(others), &others);
  }
}

void ThreadPool::AwaitLaunch(uint32_t seen, Helper* helper) {
  auto launched = [&] { return launches_.load(std::memory_order_relaxed) != seen; };
  for (int i = 0; i < kIdleSpins; ++i) {
    if (launched()) return;
    Pause();
  }
  const Clock::time_point end = Clock::now() + kIdle;
  while (calm_.load(std::memory_order_relaxed) && Clock::now() < end) {
    if (launched()) return;
    sched_yield();
  }
  helper->sleeps.store(true, std::memory_order_release);
  SleepOn(launches_, seen, idle_sleepers_, kLongSleep);
  helper->sleeps.store(false, std::memory_order_relaxed);
  if (helper->is_limited.exchange(false, std::memory_order_acq_rel)) {
    sched_setaffinity(0, sizeof(helper->cores), &helper->cores);
  }
}

}  // namespace tvm_ipc
