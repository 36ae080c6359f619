/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file point_to_point_waits_and_errors.h
 * \brief Checks and errors of point-to-point messages, shared by all backends.
 */
#ifndef TVM_IPC_CORE_POINT_TO_POINT_WAITS_AND_ERRORS_H_
#define TVM_IPC_CORE_POINT_TO_POINT_WAITS_AND_ERRORS_H_

#include <atomic>
#include <cstdint>

#include "core/communication_backend.h"
#include "core/rank_runtime_state.h"
#include "core/shared_memory_layout.h"

namespace tvm_ipc {

/*! \brief Throw unless `peer` is another rank of the session. */
void CheckPeer(const Rank& rank, const char* op, int peer);
/*! \brief Return the descriptor of a message, which both ends compare. */
Descriptor DescribeMessage(const Buffer& buffer);
/*! \brief Throw the error of an end that has waited too long for the other one. */
[[noreturn]] void FailLateMessage(const Rank& rank, const Descriptor& mine, const char* verb,
                                  int peer);
/*! \brief Throw the error of a receiver whose sender has sent a different message. */
[[noreturn]] void FailMessage(const Rank& rank, int sender, const Descriptor& theirs,
                              const Descriptor& mine);
/*!
 * \brief Wait until a word of a channel reaches a step.
 * \param sleepers The number of sleepers on the word.
 * \param verb "send to" or "receive from", for errors.
 */
void AwaitMessage(Rank& rank, const std::atomic<uint32_t>& word, uint32_t step,
                  std::atomic<uint32_t>& sleepers, const Descriptor& mine, const char* verb,
                  int peer);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_POINT_TO_POINT_WAITS_AND_ERRORS_H_
