/* SPDX-License-Identifier: Apache-2.0 */
/*! \file wait.cc */
#include "core/wait.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <ctime>

namespace tvm_ipc {

namespace {

constexpr long kSleepSliceNanoseconds = 20 * 1000 * 1000;
/*! \brief The number of checks before the first pause, in which a peer on another core answers. */
constexpr uint32_t kHotSpins = 128;

long Futex(const std::atomic<uint32_t>& word, int op, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), op, value, timeout, nullptr,
                 0);
}

/*!
 * \brief Return whether `OrderAllThreads` orders the memory accesses of this process.
 *
 * True wherever the kernel has membarrier: Linux 4.16 and later, unless a sandbox forbids it. A
 * sandbox that forbids it to some ranks of a session only costs them late wake-ups.
 */
bool IsRegistered() {
  // Not a function-local static: its initialization takes milliseconds while other threads would
  // wait, and in a process forked meanwhile it would never end. Registering twice is harmless.
  static std::atomic<int> registered{-1};
  int result = registered.load(std::memory_order_relaxed);
  if (result < 0) {
    result = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0;
    registered.store(result, std::memory_order_relaxed);
  }
  return result != 0;
}

/*! \brief Run a full memory barrier in every running thread of every registered process. */
void OrderAllThreads() {
  if (IsRegistered()) syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0);
}

/*!
 * \brief How often a thread checks a word before it sleeps. Peers on the same core, because another
 *        program uses theirs, cannot answer before it sleeps: then it soon sleeps at once.
 */
struct Patience {
  uint32_t spins = ~0u, yields = ~0u;

  WaitPolicy Limit(const WaitPolicy& policy) const {
    return {std::min(policy.spins, spins), std::min(policy.yields, yields)};
  }
  void Grow() {
    spins = spins > ~0u / 2 ? ~0u : 2 * spins;
    yields = yields > ~0u / 2 ? ~0u : 2 * yields + 1;
  }
  void Shrink(const WaitPolicy& used) {
    // Nothing was learned about checks that the policy does not have.
    if (used.spins > kHotSpins) spins = std::max(kHotSpins, used.spins / 2);
    if (used.yields > 0) yields = used.yields / 2;
  }
};
thread_local Patience patience;

void WakeSleepers(const std::atomic<uint32_t>& word, const std::atomic<uint32_t>& sleepers) {
  if (sleepers.load(std::memory_order_seq_cst) != 0) WakeAll(word);
}

}  // namespace

int AvailableCores() {
  cpu_set_t set;
  int cores = sched_getaffinity(0, sizeof(set), &set) == 0
                  ? CPU_COUNT(&set)
                  : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  if (FILE* file = fopen("/sys/fs/cgroup/cpu.max", "r")) {
    char quota[32];
    long period = 0;
    if (fscanf(file, "%31s %ld", quota, &period) == 2 && period > 0) {
      long limit = strtol(quota, nullptr, 10) / period;  // "max" gives 0
      if (limit > 0 && limit < cores) cores = static_cast<int>(limit);
    }
    fclose(file);
  }
  return cores > 0 ? cores : 1;
}

WaitPolicy ChooseWaitPolicy(int ranks_here, int cores) {
  if (ranks_here <= cores) return WaitPolicy{2000, 200};
  return WaitPolicy{kHotSpins, 200};
}

WaitResult WaitFor(const std::atomic<uint32_t>& word, uint32_t target,
                   std::atomic<uint32_t>& sleepers, const std::atomic<uint32_t>& abort,
                   const WaitPolicy& policy, std::chrono::nanoseconds deadline, Ordered ordered) {
  auto reached = [&] { return Reached(word.load(std::memory_order_acquire), target); };
  // The word takes precedence over abort: a completed step counts as completed. So it is checked
  // again after abort was seen, since a rank may publish a step and fail afterwards.
  auto aborted = [&] { return abort.load(std::memory_order_acquire) != 0 && !reached(); };
  const WaitPolicy limit = patience.Limit(policy);
  for (uint32_t i = 0; i < limit.spins; ++i) {
    if (reached()) {
      patience.Grow();
      return WaitResult::kReached;
    }
    if (i >= kHotSpins) Pause();
  }
  for (uint32_t i = 0; i < limit.yields; ++i) {
    if (reached()) {
      patience.Grow();
      return WaitResult::kReached;
    }
    if (aborted()) return WaitResult::kAborted;
    sched_yield();
  }
  patience.Shrink(limit);
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_check = Clock::now();
  Clock::time_point end = last_check + deadline;
  while (true) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (ordered == Ordered::kBySleeper) OrderAllThreads();
    const uint32_t seen = word.load(std::memory_order_seq_cst);
    if (!Reached(seen, target) && abort.load(std::memory_order_acquire) == 0) {
      const int64_t left = std::chrono::nanoseconds(end - Clock::now()).count();
      const timespec slice{0, std::clamp<int64_t>(left, 0, kSleepSliceNanoseconds)};
      Futex(word, FUTEX_WAIT, seen, &slice);
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (reached()) return WaitResult::kReached;
    if (aborted()) return WaitResult::kAborted;
    const Clock::time_point now = Clock::now();
    if (now - last_check > kStandstill) end += now - last_check;
    last_check = now;
    if (now >= end) return WaitResult::kDeadline;
  }
}

void SleepOn(const std::atomic<uint32_t>& word, uint32_t seen, std::atomic<uint32_t>& sleepers,
             std::chrono::nanoseconds most) {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (word.load(std::memory_order_seq_cst) == seen) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(most);
    const timespec time{seconds.count(), (most - seconds).count()};
    Futex(word, FUTEX_WAIT, seen, &time);
  }
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void Publish(std::atomic<uint32_t>& word, uint32_t step, const std::atomic<uint32_t>& sleepers) {
  if (!IsRegistered()) return PublishOrdered(word, step, sleepers);
  word.store(step, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);  // the compiler keeps the order too
  WakeSleepers(word, sleepers);
}

void PublishOrdered(std::atomic<uint32_t>& word, uint32_t step,
                    const std::atomic<uint32_t>& sleepers) {
  word.store(step, std::memory_order_seq_cst);
  WakeSleepers(word, sleepers);
}

void WakeAll(const std::atomic<uint32_t>& word) { Futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

}  // namespace tvm_ipc
