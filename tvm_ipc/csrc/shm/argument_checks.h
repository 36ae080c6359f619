/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file argument_checks.h
 * \brief Checks of the arguments of collectives, shared by the CPU backends. Each throws if the
 *        arguments are invalid.
 */
#ifndef TVM_IPC_SHM_ARGUMENT_CHECKS_H_
#define TVM_IPC_SHM_ARGUMENT_CHECKS_H_

#include "core/communication_backend.h"

namespace tvm_ipc {

/*! \brief A member of a team: the team's size, and the member's index. */
struct SliceOfTeam {
  int size;
  int index;
  size_t members() const { return static_cast<size_t>(size); }
};

/*! \brief Throw unless a root is the index of a member. */
void CheckRoot(const char* operation, int root, int size);
void CheckAllReduce(const Buffer& send, const Buffer& recv);
/*! \param recv The root's output; null on other members. */
void CheckReduce(const Buffer& send, bool receives, const Buffer* recv);
void CheckReduceScatter(const Buffer& send, const Buffer& recv, SliceOfTeam part);
void CheckAllGather(const Buffer& send, const Buffer& recv, SliceOfTeam part);
void CheckBroadcast(const Buffer* send, bool sends, const Buffer& recv);
void CheckScatter(const Buffer* send, bool sends, const Buffer& recv, SliceOfTeam part);
void CheckGather(const Buffer& send, bool receives, const Buffer* recv, SliceOfTeam part);
void CheckPermute(const Buffer& send, const Sources& sources, const Buffer& recv, SliceOfTeam part);
void CheckAllToAll(const Buffer& send, const SplitCounts& parts, const Buffer& recv,
                   SliceOfTeam part);

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_ARGUMENT_CHECKS_H_
