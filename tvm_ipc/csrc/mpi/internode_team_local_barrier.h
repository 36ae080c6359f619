/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_team_local_barrier.h
 * \brief One operation of a team of several nodes, seen from a member: the barrier of the members
 * on this node. Messages to other nodes are in core/send_receive_internode_messages.h.
 */
#ifndef TVM_IPC_MPI_INTERNODE_TEAM_LOCAL_BARRIER_H_
#define TVM_IPC_MPI_INTERNODE_TEAM_LOCAL_BARRIER_H_

#include "core/send_receive_internode_messages.h"
#include "core/team_members_by_node.h"
#include "shm/team_operation.h"

namespace tvm_ipc {

/*! \brief A team whose members are on several nodes, in an operation. */
class InternodeTeam {
 public:
  InternodeTeam(Rank& rank, const NodeLayout& layout)
      : rank_(rank), layout_(layout), team_(rank, rank.BeginInternode(layout.team)) {}

  Rank& rank() const { return rank_; }
  const NodeLayout& layout() const { return layout_; }
  /*! \brief Return the members on this node. */
  Team& team() { return team_; }
  const TeamBarrier& barrier() const { return team_.barrier(); }
  /*!
   * \brief Synchronize the members on this node. The deadline is longer than that of a wait for
   *        another node, so that the error of the latter is raised and names that node.
   */
  void Enter(const Descriptor& mine) { team_.Enter(mine, rank_.options().deadline * 5 / 4); }

 private:
  Rank& rank_;
  const NodeLayout& layout_;
  Team team_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_INTERNODE_TEAM_LOCAL_BARRIER_H_
