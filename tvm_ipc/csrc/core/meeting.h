/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file meeting.h
 * \brief Who does collectives together, and when: the step that all collectives are made of.
 *
 * Where the members' data lies is a backend's business; shm/team.h is that of CPUs.
 */
#ifndef TVM_IPC_CORE_MEETING_H_
#define TVM_IPC_CORE_MEETING_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/control.h"
#include "core/shows.h"
#include "core/wait.h"

namespace tvm_ipc {

/*! \brief What a rank is told when it joins. */
struct RankOptions {
  std::chrono::nanoseconds deadline{0};
  WaitPolicy wait{0, 0};
  /*! \brief The same for all ranks, so that their reductions have the same bits. */
  std::string instruction_set;
  /*! \brief Whether reductions over several nodes have the bits that they would have on one. */
  bool flat = false;
  /*! \brief Its device, of the kind that the backend works on. */
  int device = 0;
};

/*!
 * \brief A team seen from one of its members.
 *
 * A collective is a sequence of steps. In step e a member may write what it shows for e, then
 * `Enter` publishes the descriptor and whatever was written before, and returns when every peer
 * has published step e too. From then on what peers show for step e can be read.
 *
 * Invariant: who has passed step e + 1 knows that every peer has finished reading what step e
 * showed it, since a peer publishes e + 1 after its reads. So what was shown for step e may be
 * written again for step e + 2, and two copies do for any sequence of steps; no peer is ever more
 * than one step ahead, and steps may wrap. What has no second copy is protected by one more step,
 * the exit barrier, or by the caller's promise.
 *
 * Steps of different teams have nothing to do with each other. Two threads of a rank may be in
 * steps of two teams, and are never in one at the same time (`Rank::Begin`).
 */
class Meeting {
 public:
  /*! \param places Which of its seats each member has in this team. */
  Meeting(Control& control, TeamId team, std::vector<int> ranks, const std::vector<int>& places,
          int me, const RankOptions& options, const WaitPolicy& wait);

  TeamId team() const { return team_; }
  int size() const { return static_cast<int>(members_.size()); }
  /*! \brief This rank's index in the team. */
  int index() const { return me_; }
  int rank(int index) const { return members_[index].rank; }
  /*! \brief Which of the member's seats it has in this team. */
  int place(int index) const { return members_[index].place; }

  /*! \brief The last step that this member entered. */
  uint32_t step() const { return step_; }
  /*! \brief The next step: publish, and wait for every peer. Throws when they disagree. */
  void Enter(const Descriptor& mine) { Enter(mine, options_.deadline); }
  void Enter(const Descriptor& mine, std::chrono::nanoseconds deadline);
  /*! \brief What a member showed in the last step. */
  const Descriptor& shown(int index) const { return seat(index).slot[step_ & 1].descriptor; }

  /*! \brief Before an operation: start again at step 0 if the session has recovered since. */
  void Follow(uint32_t generation) {
    if (generation == generation_) return;
    generation_ = generation;
    step_ = 0;
    shows_.Forget();
  }
  uint32_t generation() const { return generation_; }
  /*! \brief What this member shows to the others. */
  Shows& shows() { return shows_; }
  /*! \brief Whether all members are on this node, so that they can meet. */
  bool here() const { return here_; }
  /*! \brief This member's mark that a thread of its rank is in an operation. */
  std::atomic<uint32_t>& busy() const { return seat(me_).busy; }
  /*! \brief " in team 3 (ranks 0, 2, 3)" for errors; nothing in the world. */
  std::string Where() const;
  /*! \brief Errors are to name these ranks, for the team has more than those who meet here. */
  void Name(std::vector<int> ranks) { named_ = std::move(ranks); }
  /*! \brief For tests: steps wrap after 2^32; every member sets the same, with the team idle. */
  void SkipTo(uint32_t step);

 private:
  friend class Shows;

  struct Member {
    Seat* seat;
    int32_t rank;
    int32_t place;
  };

  Seat& seat(int index) const { return *members_[index].seat; }
  /*! \brief "rank 2 (pid 10), last seen in ..." if that was in the step. */
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
  Shows shows_;
};

/*! \brief "rank 2 failed" and the like. */
std::string DescribeAbort(const Control& control);
/*! \brief "node b (ranks 2 to 3)". */
std::string DescribeNode(const Control& control, int node);
/*! \brief Of numbers that all members were given; not 0 but for none. */
uint64_t HashOf(const std::vector<int64_t>& numbers);
/*! \brief "allreduce(sum) of 12 x float32" and the like. */
std::string Describe(const Descriptor& descriptor);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_MEETING_H_
