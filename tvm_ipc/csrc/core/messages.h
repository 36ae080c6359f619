/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file messages.h
 * \brief What messages from one rank to another have in common, whoever moves them.
 */
#ifndef TVM_IPC_CORE_MESSAGES_H_
#define TVM_IPC_CORE_MESSAGES_H_

#include <atomic>
#include <cstdint>

#include "core/backend.h"
#include "core/control.h"
#include "core/group.h"

namespace tvm_ipc {

/*! \brief Throw unless it is another rank of the session. */
void CheckPeer(const Rank& rank, const char* op, int peer);
/*! \brief What both ends of a message say of it. */
Descriptor DescribeMessage(const Buffer& buffer);
/*! \brief Throw what an end says for which the other one has not come. */
[[noreturn]] void FailLateMessage(const Rank& rank, const Descriptor& mine, const char* verb,
                                  int peer);
/*! \brief Throw what a receiver says where the sender's message is another one. */
[[noreturn]] void FailMessage(const Rank& rank, int sender, const Descriptor& theirs,
                              const Descriptor& mine);
/*!
 * \brief Wait until a word of a channel reaches a step.
 * \param sleepers Of the word.
 * \param verb "send to" or "receive from", for errors.
 */
void AwaitMessage(Rank& rank, const std::atomic<uint32_t>& word, uint32_t step,
                  std::atomic<uint32_t>& sleepers, const Descriptor& mine, const char* verb,
                  int peer);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_MESSAGES_H_
