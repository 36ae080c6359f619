/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file across.h
 * \brief One operation of a team across nodes, seen from a member: the meeting of the members on
 *        this node. Messages to and from other nodes are those of core/wire_messages.h.
 */
#ifndef TVM_IPC_MPI_ACROSS_H_
#define TVM_IPC_MPI_ACROSS_H_

#include "core/layout.h"
#include "core/wire_messages.h"
#include "shm/team.h"

namespace tvm_ipc {

/*! \brief A team whose members are on several nodes, in an operation. */
class Across {
 public:
  Across(Rank& rank, const Layout& layout)
      : rank_(rank), layout_(layout), team_(rank, rank.BeginAcross(layout.team)) {}

  Rank& rank() const { return rank_; }
  const Layout& layout() const { return layout_; }
  /*! \brief The members on this node. */
  Team& team() { return team_; }
  const Meeting& meeting() const { return team_.meeting(); }
  /*!
   * \brief The members on this node meet. They wait longer than one of them waits for another node,
   *        so that the error names that node.
   */
  void Enter(const Descriptor& mine) { team_.Enter(mine, rank_.options().deadline * 5 / 4); }

 private:
  Rank& rank_;
  const Layout& layout_;
  Team team_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_ACROSS_H_
