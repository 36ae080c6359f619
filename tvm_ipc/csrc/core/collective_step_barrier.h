/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file collective_step_barrier.h
 * \brief The barrier of a team: the step that all collectives consist of.
 *
 * Each backend decides where the members' data is stored; shm/team_operation.h does so for CPUs.
 */
#ifndef TVM_IPC_CORE_COLLECTIVE_STEP_BARRIER_H_
#define TVM_IPC_CORE_COLLECTIVE_STEP_BARRIER_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/exposed_buffers.h"
#include "core/shared_memory_layout.h"
#include "core/wait.h"

namespace tvm_ipc {

/*! \brief The settings that a rank gets when it joins a session. */
struct RankOptions {
  std::chrono::nanoseconds deadline{0};
  WaitPolicy wait{0, 0};
  /*! \brief Identical on all ranks, so that reductions are bitwise identical. */
  std::string instruction_set;
  /*! \brief Whether reductions over several nodes have the same bits as on one node. */
  bool flat = false;
  /*! \brief The index of its device, of the type that the backend works on. */
  int device = 0;
  /*! \brief The number of CUDA's queues for streams, if workers that are threads may capture
   *         collectives in CUDA graphs; else 0. */
  int queues_for_graphs = 0;
};

/*!
 * \brief A team seen from one of its members.
 *
 * A collective is a sequence of steps. Before step e a member may write the data that it exposes in
 * step e. `Enter` then publishes the descriptor and everything written before, and returns when
 * every peer has published step e. From then on the peers' data of step e can be read.
 *
 * Invariant: a member that has passed step e + 1 knows that every peer has finished reading the
 * data of step e, because a peer publishes e + 1 after its reads. So memory that was exposed in
 * step e may be written again for step e + 2, and two buffers suffice for any sequence of steps. No
 * peer is ever more than one step ahead, and steps may wrap. Data without a second buffer is
 * protected by one more step, the exit barrier, or by the caller's promise.
 *
 * Steps of different teams are independent. Two threads of a rank may be in steps of two teams, but
 * never in steps of the same team at the same time (`Rank::Begin`).
 */
class TeamBarrier {
 public:
  /*!
   * \param slots The index of each member's team slot.
   * \param me This rank's index in the team.
   */
  TeamBarrier(Control& control, TeamId team, std::vector<int> ranks, const std::vector<int>& slots,
              int me, const RankOptions& options, const WaitPolicy& wait);

  TeamId team() const { return team_; }
  int size() const { return static_cast<int>(members_.size()); }
  /*! \brief Return this rank's index in the team. */
  int index() const { return me_; }
  int rank(int index) const { return members_[index].rank; }
  /*! \brief Return the index of a member's team slot. */
  int slot_index(int index) const { return members_[index].slot_index; }

  /*! \brief Return the last step that this member entered. */
  uint32_t step() const { return step_; }
  /*! \brief Enter the next step: publish, and wait for every peer. Throw if the ranks disagree. */
  void Enter(const Descriptor& mine) { Enter(mine, options_.deadline); }
  void Enter(const Descriptor& mine, std::chrono::nanoseconds deadline);
  /*!
   * \brief Compare this member's operation with those of the others before the next step. Throw if
   *        the ranks disagree.
   *
   * Called while this member waits for another node. It has not entered the step that compares the
   * operations, and another member may be waiting as well, in a different operation.
   */
  void CompareStalled(const Descriptor& mine) const;
  /*! \brief Return the descriptor that a member published in the last step. */
  const Descriptor& exposed(int index) const { return team_slot(index).slot[step_ & 1].descriptor; }

  /*! \brief Start again at step 0 if the session has recovered. Called before each operation. */
  void Follow(uint32_t generation) {
    if (generation == generation_) return;
    generation_ = generation;
    step_ = 0;
    exposed_buffers_.Forget();
  }
  uint32_t generation() const { return generation_; }
  /*! \brief Return the buffers that this member exposes to the others. */
  ExposedBuffers& exposed_buffers() { return exposed_buffers_; }
  /*! \brief Return whether all members are on this node. */
  bool here() const { return here_; }
  /*! \brief Return the flag that a thread of this rank sets while in an operation of the team. */
  std::atomic<uint32_t>& in_use() const { return team_slot(me_).in_use; }
  /*! \brief " in team 3 (ranks 0, 2, 3)" for errors; nothing in the world. */
  std::string Where() const;
  /*! \brief Set the ranks that errors name: the whole team, if only some of it are on this node. */
  void NameRanks(std::vector<int> ranks) { named_ = std::move(ranks); }
  /*! \brief Set the step, to test the wrap at 2^32. Every member sets the same step while the team
   *         is idle. */
  void SkipTo(uint32_t step);

 private:
  friend class ExposedBuffers;

  struct Member {
    TeamSlot* team_slot;
    int32_t rank;
    int32_t slot_index;
  };

  TeamSlot& team_slot(int index) const { return *members_[index].team_slot; }
  /*! \brief Return "rank 2 (pid 10)", with ", last seen in ..." if it was seen in the step. */
  std::string Name(int index, uint32_t step) const;
  [[noreturn]] void FailDeadline(const Descriptor& mine) const;
  [[noreturn]] void FailMismatch() const;

  Control& control_;
  const RankOptions& options_;
  const WaitPolicy wait_;
  std::vector<Member> members_;
  std::vector<int> named_;
  int me_;
  TeamId team_;
  bool here_ = true;
  uint32_t step_ = 0;
  uint32_t generation_;
  ExposedBuffers exposed_buffers_;
};

/*! \brief Describe why the session was aborted, for example "rank 2 failed; ...". */
std::string DescribeAbort(const Control& control);
/*! \brief Describe a node, for example "node b (ranks 2 to 3)". */
std::string DescribeNode(const Control& control, int node);
/*! \brief Describe an operation, for example "allreduce(sum) of 12 x float32". */
std::string Describe(const Descriptor& descriptor);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_COLLECTIVE_STEP_BARRIER_H_
