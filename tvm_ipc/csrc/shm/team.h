/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file team.h
 * \brief A team between CPUs of one machine: its meeting, and where its members' memory lies.
 */
#ifndef TVM_IPC_SHM_TEAM_H_
#define TVM_IPC_SHM_TEAM_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/group.h"
#include "core/trace.h"

namespace tvm_ipc {

/*!
 * \brief One operation of a team, seen from a member.
 *
 * What a member shows in step e lies in its staging buffer e & 1 of the team, or in its arena.
 * `Meeting` says why two buffers do, and when memory that is shown where it lies may be written.
 */
class Team {
 public:
  /*! \param id 0 for the world, 1 for the rank's group, larger ones were made (core/teams.h). */
  Team(Rank& rank, TeamId id) : turn_(rank.Begin(id)), segments_(*rank.segments()) {}

  /*! \brief Of those who meet in a turn. */
  Team(Rank& rank, Turn turn) : turn_(std::move(turn)), segments_(*rank.segments()) {}

  const Meeting& meeting() const { return turn_.meeting; }
  int size() const { return turn_.meeting.size(); }
  /*! \brief This rank's index in the team. */
  int index() const { return turn_.meeting.index(); }
  int rank(int index) const { return turn_.meeting.rank(index); }
  void Enter(const Descriptor& mine) { turn_.meeting.Enter(mine); }
  void Enter(const Descriptor& mine, std::chrono::nanoseconds deadline) {
    turn_.meeting.Enter(mine, deadline);
  }
  /*! \brief What a member showed in the last step. */
  const Descriptor& shown(int index) const { return turn_.meeting.shown(index); }

  /*! \brief Whether what all members showed in the last step lies in their arenas. */
  bool InArenas() const {
    bool all = true;
    for (int i = 0; i < size(); ++i) all = all && shown(i).offset >= 0;
    return all;
  }

  /*! \brief The buffer to fill for the next step. */
  uint8_t* NextBuffer() const {
    Trace("stage", rank(index()), (turn_.meeting.step() + 1) & 1);
    return Stage(index(), turn_.meeting.step() + 1);
  }
  /*!
   * \brief Ask for the next buffer's cache lines, which the peers have; they have read it. They
   *        arrive while this step's data is used, not while the next step's is written.
   */
  void ClaimNextBuffer(size_t bytes) const {
#if defined(__x86_64__)
    const uint8_t* buffer = Stage(index(), turn_.meeting.step() + 1);
    for (size_t at = 0; at < bytes; at += kLine) asm volatile("prefetchw %0" : : "m"(buffer[at]));
#endif
  }
  const uint8_t* buffer(int index) const {
    Trace("read staging", rank(index), turn_.meeting.step() & 1);
    return Stage(index, turn_.meeting.step());
  }
  const uint8_t* memory(int index, int64_t offset) const {
    Trace("read input", rank(index), 0);
    return segments_.base(rank(index)) + offset;
  }

 private:
  uint8_t* Stage(int index, uint32_t step) const {
    return segments_.base(rank(index)) +
           (2 * turn_.meeting.place(index) + (step & 1)) * kStageBytes;
  }

  Turn turn_;
  const Segments& segments_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_TEAM_H_
