/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file wait.h
 * \brief Wait for a word of shared memory: spin, then yield, then sleep in the kernel.
 */
#ifndef TVM_IPC_CORE_WAIT_H_
#define TVM_IPC_CORE_WAIT_H_

#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/shared_memory_layout.h"

namespace tvm_ipc {

/*! \brief Tell the processor that this thread checks a word in a loop. */
inline void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/*! \brief The number of checks before switching to the next, cheaper and slower, way of waiting. */
struct WaitPolicy {
  /*! \brief The number of checks of the word without a pause. */
  uint32_t spins;
  /*! \brief The number of checks of the word with a sched_yield in between. */
  uint32_t yields;
};

/*!
 * \brief Choose a policy. With a core for each rank a peer is about to answer: spin for some tens
 * of microseconds. With fewer, the peer may wait for this very core: yield it at once.
 */
WaitPolicy ChooseWaitPolicy(int ranks_here, int cores);

/*! \brief Return how many processors this process may use, a container's quota included. */
int AvailableCores();

/*!
 * \brief A sleep of milliseconds that takes this long means that the process or its machine was
 *        stopped (Ctrl-Z). Peers that were stopped as well had no time to answer, so such a sleep
 *        does not count against a deadline.
 */
constexpr std::chrono::seconds kStandstill{1};

enum class WaitResult { kReached, kAborted, kDeadline };

/*! \brief Which side pays for the memory barrier that prevents a lost wake-up: see `Publish`. */
enum class Ordered { kBySleeper, kByPublisher };

/*!
 * \brief Wait until `word` reaches step `target`.
 * \param sleepers Counts sleepers on `word`; `Publish` checks it.
 * \param abort Ends the wait when not zero.
 * \param ordered Which of the two functions below stores the steps.
 *
 * The acquire load that sees the step pairs with the release store in `Publish`.
 */
WaitResult WaitFor(const std::atomic<uint32_t>& word, uint32_t target,
                   std::atomic<uint32_t>& sleepers, const std::atomic<uint32_t>& abort,
                   const WaitPolicy& policy, std::chrono::nanoseconds deadline,
                   Ordered ordered = Ordered::kBySleeper);

/*!
 * \brief Store a step and wake the threads that sleep on it.
 *
 * The store must not be reordered with the load of `sleepers`, nor a sleeper's announcement with
 * its last load of the word (Dekker's pattern). A barrier here would double the cost of every step,
 * so the sleeper, which has time, pays for both: between its announcement and its load it makes the
 * kernel run a barrier in every thread of all ranks (membarrier). Its load sees a step that was
 * stored before that barrier; a load of `sleepers` after the barrier sees the announcement. Where
 * the kernel has no such call, the accesses are sequentially consistent. Only this function and
 * `WakeAll` wake a sleeper; it checks again every 20 ms nevertheless.
 */
void Publish(std::atomic<uint32_t>& word, uint32_t step, const std::atomic<uint32_t>& sleepers);

/*!
 * \brief Like `Publish`, for words whose sleepers wait long anyway, for example for a network: the
 *        publisher pays for the ordering, not the sleeper, which passes `Ordered::kByPublisher`.
 */
void PublishOrdered(std::atomic<uint32_t>& word, uint32_t step,
                    const std::atomic<uint32_t>& sleepers);

/*!
 * \brief Sleep for at most `most` while the word is `seen`. A thread that changes it loads
 *        `sleepers` afterwards, both sequentially consistent, and wakes the sleepers.
 */
void SleepOn(const std::atomic<uint32_t>& word, uint32_t seen, std::atomic<uint32_t>& sleepers,
             std::chrono::nanoseconds most);

/*! \brief Wake all threads that sleep on the word, even though it did not change. */
void WakeAll(const std::atomic<uint32_t>& word);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_WAIT_H_
