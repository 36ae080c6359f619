/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file wait.h
 * \brief Bounded waits: a deadline, the session's abort word, or an error in another thread ends
 *        every wait.
 */
#ifndef TVM_IPC_CUDA_KERNELS_WAIT_H_
#define TVM_IPC_CUDA_KERNELS_WAIT_H_

#include "cuda/kernels/device_intrinsics.h"

namespace tvm_ipc {
namespace kernels {

/*! \brief What a thread waits for, as the error record reports it. */
struct Waiting {
  Phase phase;
  int32_t member;
  /*! \brief The epoch of a team, or the packet number of a channel. */
  uint32_t epoch;
};

/*!
 * \brief Begin the error record and set the failure flag, which ends all other waits. Return false
 *        if another thread has already done so. Otherwise the caller adds its part and stores the
 *        code last.
 */
TVM_IPC_RARE bool BeginRecord(const Guard& guard, Waiting waiting, const Header& mine) {
  if (!Claim(guard.failed)) return false;
  ErrorRecord& record = *guard.error;
  record.member = waiting.member;
  record.phase = waiting.phase;
  record.epoch = waiting.epoch;
  record.mine = mine;
  return true;
}

/*!
 * \brief Return the time until which waiting makes sense, or 0 if the wait must end.
 * \param until The result of the previous call, or 0 in the first one.
 * \param far Whether to read the abort word too.
 */
TVM_IPC_RARE uint64_t LookAround(const Guard& guard, Waiting waiting, const Header& mine,
                                 uint64_t until, bool far) {
  if (LoadRelaxed(guard.failed) != 0) return 0;
  const uint64_t now = Clock();
  if (until == 0) until = guard.timeout < ~now ? now + guard.timeout : ~0ull;
  ErrorCode code = now > until ? kDeadline : kNoError;
  if (far && guard.abort != nullptr && LoadRelaxed(guard.abort) != 0) code = kAborted;
  if (code == kNoError) return until;
  if (BeginRecord(guard, waiting, mine)) StoreRelease(&guard.error->code, code);
  return 0;
}

/*! \brief The state of a thread's wait. */
struct Patience {
  uint32_t turn = 0;
  uint64_t until = 0;

  /*!
   * \brief Return whether the wait must end; call it between two polls.
   *
   * Most calls do nothing. The clock and the word `failed` are read only once in kLook calls, and
   * the abort word, which is on the other side of a bus, once in kLookFar calls.
   */
  TVM_IPC_DEVICE bool Ends(const Guard& guard, Waiting waiting, const Header& mine) {
    constexpr uint32_t kLook = 64, kLookFar = 4096;
    ++turn;
    Pause(turn);
    if (turn % kLook != 0) return false;
    until = LookAround(guard, waiting, mine, until, turn % kLookFar == 0);
    return until == 0;
  }
};

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_WAIT_H_
