/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file host_barrier_and_agreement.h
 * \brief A barrier on the host between the members of a team, before they call NCCL.
 *
 * Members on one machine use shared memory (core/collective_step_barrier.h). If a team has members
 * on several nodes, there are three steps: a barrier of the members on each node; an exchange of
 * short messages about the call between the first members of the nodes
 * (core/internode_request_queue.h); and another barrier on each node. Nodes whose calls differ
 * therefore raise an error before NCCL is called, and a wait for another node ends like any other
 * wait. NCCL moves the tensors; MPI moves only these messages.
 */
#ifndef TVM_IPC_NCCL_HOST_BARRIER_AND_AGREEMENT_H_
#define TVM_IPC_NCCL_HOST_BARRIER_AND_AGREEMENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/internode_request_queue.h"
#include "core/rank_runtime_state.h"
#include "core/team_members_by_node.h"
#include "nccl/library.h"

namespace tvm_ipc::nccl {

/*! \brief The result of comparing the members' values. */
struct Agreed {
  /*! \brief Whether all members have the same value, other than 0. */
  bool same = false;
  /*! \brief The sum of the members' numbers. */
  uint64_t sum = 0;
  /*! \brief Whether some members are threads of one process. */
  bool threads = false;
};

class Gathering {
 public:
  /*! \param ring Null in a session on one machine. */
  Gathering(Rank& rank, InternodeRing* ring, const NodeLayout& layout)
      : rank_(rank),
        ring_(ring),
        layout_(layout),
        guard_(layout.is_internode() ? rank.BeginInternode(layout.team) : rank.Begin(layout.team)) {
  }

  int size() const { return layout_.size(); }
  /*! \brief Return this rank's index in the team. */
  int index() const { return layout_.me; }
  int rank(int place) const { return layout_.ranks[static_cast<size_t>(place)]; }
  /*! \brief Return the barrier of the members on this node. */
  const TeamBarrier& here() const { return guard_.barrier; }
  std::string Where() const { return guard_.barrier.Where(); }

  /*! \brief Synchronize with all members. Throw if their operations differ. */
  void Enter(const Descriptor& mine);
  /*!
   * \brief Synchronize, and compare the members' values.
   * \param has A value that must be equal on all members; 0 if the member has none.
   * \param number A number to add up over all members.
   */
  Agreed Agree(Descriptor mine, uint32_t has, uint64_t number);
  /*! \brief Synchronize, and return the `id` of the first member. The others' `id` is ignored. */
  UniqueId Tell(const Descriptor& mine, const UniqueId& id);

 private:
  /*! \brief The message of the first member of a node, on behalf of all members there. */
  struct Said {
    uint64_t sum = 0;
    /*! \brief A random number that identifies the process. */
    uint64_t process = 0;
    uint32_t has = 0;
    uint32_t threads = 0;
    UniqueId id{};
  };

  bool leads() const { return guard_.barrier.index() == 0; }
  /*! \brief Return the messages of the first members of all nodes, by node index. */
  std::vector<Said> AllGatherOverNodes(const Descriptor& mine, const Said& own);
  /*! \brief Synchronize with the members on this node. The deadline is longer, because the first
   *         member waits for other nodes meanwhile. */
  void EnterAfterOthers(const Descriptor& mine) {
    guard_.barrier.Enter(mine, rank_.options().deadline * 5 / 4);
  }

  Rank& rank_;
  InternodeRing* ring_;
  const NodeLayout& layout_;
  OpGuard guard_;
};

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_HOST_BARRIER_AND_AGREEMENT_H_
