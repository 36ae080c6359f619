/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file team_operation.h
 * \brief A team of ranks on the CPUs of one machine: its barrier, and its members' memory.
 */
#ifndef TVM_IPC_SHM_TEAM_OPERATION_H_
#define TVM_IPC_SHM_TEAM_OPERATION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/protocol_trace_test_hook.h"
#include "core/rank_runtime_state.h"

namespace tvm_ipc {

/*!
 * \brief One operation of a team, seen from a member.
 *
 * The data that a member exposes in step e is in its staging buffer e & 1 of the team, or in its
 * arena. `TeamBarrier` explains why two buffers suffice, and when memory that peers read in place
 * may be written again.
 */
class Team {
 public:
  /*! \param id 0 for the world, 1 for the rank's group, otherwise a user-created team
   *         (core/teams.h). */
  Team(Rank& rank, TeamId id) : Team(rank, rank.Begin(id)) {}

  /*! \brief Make a team of the members of an operation that has begun. */
  Team(Rank& rank, OpGuard guard) : rank_(rank), guard_(std::move(guard)) {}

  const TeamBarrier& barrier() const { return guard_.barrier; }
  int size() const { return guard_.barrier.size(); }
  /*! \brief Return this rank's index in the team. */
  int index() const { return guard_.barrier.index(); }
  int rank(int index) const { return guard_.barrier.rank(index); }
  /*! \brief Return the descriptor of a call, with the offset of its input. */
  Descriptor Describe(const Call& call) const {
    Descriptor mine = DescriptorOf(call, rank(call.root));
    mine.offset = rank_.OffsetOf(call.send.data, call.send.bytes());
    return mine;
  }
  void Enter(const Descriptor& mine) { guard_.barrier.Enter(mine); }
  void Enter(const Descriptor& mine, std::chrono::nanoseconds deadline) {
    guard_.barrier.Enter(mine, deadline);
  }
  /*! \brief Return the descriptor that a member published in the last step. */
  const Descriptor& exposed(int index) const { return guard_.barrier.exposed(index); }

  /*! \brief Return whether the inputs of all members in the last step are in their arenas. */
  bool InArenas() const {
    bool all = true;
    for (int i = 0; i < size(); ++i) all = all && exposed(i).offset >= 0;
    return all;
  }

  /*! \brief Return the buffer to fill for the next step. */
  uint8_t* NextBuffer() const {
    Trace("stage", rank(index()), (guard_.barrier.step() + 1) & 1);
    return StagingBuffer(index(), guard_.barrier.step() + 1);
  }
  /*!
   * \brief Prefetch the next buffer's cache lines from the peers, which have finished reading it.
   *        They arrive while this step's data is used, not while the next step's is written.
   */
  void ClaimNextBuffer(size_t bytes) const {
#if defined(__x86_64__)
    const uint8_t* buffer = StagingBuffer(index(), guard_.barrier.step() + 1);
    for (size_t at = 0; at < bytes; at += kLine) asm volatile("prefetchw %0" : : "m"(buffer[at]));
#endif
  }
  const uint8_t* buffer(int index) const {
    Trace("read staging", rank(index), guard_.barrier.step() & 1);
    return StagingBuffer(index, guard_.barrier.step());
  }
  const uint8_t* memory(int index, int64_t offset) const {
    Trace("read input", rank(index), 0);
    return rank_.segments()->base(rank(index)) + offset;
  }

 private:
  uint8_t* StagingBuffer(int index, uint32_t step) const {
    return rank_.segments()->base(rank(index)) +
           (2 * guard_.barrier.slot_index(index) + (step & 1)) * kStageBytes;
  }

  Rank& rank_;
  OpGuard guard_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_TEAM_OPERATION_H_
