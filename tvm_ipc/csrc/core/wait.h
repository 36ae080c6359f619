/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file wait.h
 * \brief Waiting for a word of shared memory: spin, then yield, then sleep in the kernel.
 */
#ifndef TVM_IPC_CORE_WAIT_H_
#define TVM_IPC_CORE_WAIT_H_

#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/control.h"

namespace tvm_ipc {

/*! \brief How long to try before the next, cheaper and slower, way of waiting. */
struct WaitPolicy {
  /*! \brief Looks at the word in a row. */
  uint32_t spins;
  /*! \brief Looks with the processor offered to somebody else in between. */
  uint32_t yields;
};

/*!
 * \brief With a core for each rank a peer is about to answer: spin for some tens of microseconds.
 *        With fewer, the peer may wait for this very core: hand it over at once.
 */
WaitPolicy ChooseWaitPolicy(int ranks_here, int cores);

/*! \brief Processors that this process may run on, a container's quota included. */
int AvailableCores();

enum class WaitResult { kReached, kAborted, kDeadline };

/*! \brief Who sees to it that a wake-up is not lost: see `Publish`. */
enum class Ordered { kBySleeper, kByPublisher };

/*!
 * \brief Wait until `word` reaches step `target`.
 * \param sleepers Counts sleepers on `word`; `Publish` looks at it.
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
 * \brief Store a step and wake whoever sleeps on it.
 *
 * The store and the look at `sleepers` must not be swapped, nor a sleeper's announcement and its
 * last look at the word (Dekker's pattern). A barrier here would cost every step as much as the
 * rest of it, so the sleeper, who has time, pays for both: between its announcement and its look
 * it has the kernel run a barrier in every thread of all ranks (membarrier). A step stored before
 * that is seen by its look; a look at `sleepers` after that sees the announcement. Where the
 * kernel has no such call, the accesses are sequentially consistent. A sleeper is woken by nothing
 * else than this and `WakeAll`, but looks again every 20 ms all the same.
 */
void Publish(std::atomic<uint32_t>& word, uint32_t step, const std::atomic<uint32_t>& sleepers);

/*!
 * \brief The same for words whose sleepers wait long anyway, such as for a network: who stores pays
 *        for the order, and a sleeper for nothing. They say `Ordered::kByPublisher`.
 */
void PublishOrdered(std::atomic<uint32_t>& word, uint32_t step,
                    const std::atomic<uint32_t>& sleepers);

/*!
 * \brief Sleep for at most so long while the word is as it was seen. Who changes it looks at
 *        `sleepers` afterwards, both sequentially consistent, and wakes.
 */
void SleepOn(const std::atomic<uint32_t>& word, uint32_t seen, std::atomic<uint32_t>& sleepers,
             std::chrono::nanoseconds most);

/*! \brief Wake everybody who sleeps on the word, though it did not change. */
void WakeAll(const std::atomic<uint32_t>& word);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_WAIT_H_
