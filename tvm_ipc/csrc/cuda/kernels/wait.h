/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file wait.h
 * \brief No wait is endless: a deadline, the session's abort word, and what others have found.
 */
#ifndef TVM_IPC_CUDA_KERNELS_WAIT_H_
#define TVM_IPC_CUDA_KERNELS_WAIT_H_

#include "cuda/kernels/device.h"

namespace tvm_ipc {
namespace kernels {

/*! \brief What a thread waits for, for the record of an error. */
struct Waiting {
  Phase phase;
  int32_t member;
  /*! \brief Of a team; of a channel, the packet. */
  uint32_t epoch;
};

/*!
 * \brief Begin to tell the host, and everybody here, who leaves then. False: somebody has.
 *        The caller ends it by the code, after what it has to add.
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
 * \brief Whether there is any sense in waiting on: 0 if not, else until when there is.
 * \param until 0: not known yet.
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

/*! \brief How long a thread has waited. */
struct Patience {
  uint32_t turn = 0;
  uint64_t until = 0;

  /*!
   * \brief Between two looks at what has not come yet. True: leave, it will not come.
   *
   * Mostly it does nothing: the clock and the word `failed` are looked at seldom, and the abort
   * word, which is on the other side of a bus, more seldom.
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
