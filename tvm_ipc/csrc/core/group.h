/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file group.h
 * \brief A rank, the teams it belongs to, and the step that all collectives are made of.
 */
#ifndef TVM_IPC_CORE_GROUP_H_
#define TVM_IPC_CORE_GROUP_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/connection.h"
#include "core/control.h"
#include "core/error.h"
#include "core/file.h"
#include "core/wait.h"

namespace tvm_ipc {

/*! \brief The shared memory of a session, mapped once in a process for all its ranks here. */
class Segments {
 public:
  /*!
   * \brief Map, or find the mapping that another rank of this process made.
   * \param token The session's.
   * \param control The control block's file.
   * \param segments The ranks' files, in rank order.
   */
  static std::shared_ptr<Segments> Map(const std::string& token, int control,
                                       const std::vector<int>& segments);
  ~Segments();
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;

  Control& control() const { return *control_; }
  uint8_t* base(int rank) const { return bases_[rank]; }
  size_t segment_bytes() const { return segment_bytes_; }

 private:
  Segments() = default;
  Control* control_ = nullptr;
  size_t control_bytes_ = 0;
  size_t segment_bytes_ = 0;
  std::vector<uint8_t*> bases_;
};

/*! \brief What a rank is told when it joins. */
struct RankOptions {
  std::chrono::nanoseconds deadline{0};
  WaitPolicy wait{0, 0};
  /*! \brief The same for all ranks, so that their reductions have the same bits. */
  std::string instruction_set;
};

/*!
 * \brief Ranks that do collectives together, seen from one of them.
 *
 * A collective is a sequence of steps. In step e a rank may write its staging buffer e & 1, then
 * `Enter` publishes the descriptor and whatever was written before, and returns when every peer
 * has published step e too. From then on peers' buffers and inputs of step e can be read.
 *
 * Invariant: who has passed step e + 1 knows that every peer has finished reading what step e
 * showed it, since a peer publishes e + 1 after its reads. So the buffer of step e may be written
 * again for step e + 2, and two buffers do for any sequence of steps; no peer is ever more than
 * one step ahead, and steps may wrap. Memory shown by its offset has no second copy: it is
 * protected by one more step, the exit barrier, or by the caller's promise.
 */
class Team {
 public:
  Team(std::shared_ptr<Segments> segments, int seat_row, std::vector<int> ranks, int me,
       const RankOptions& options);

  int size() const { return static_cast<int>(ranks_.size()); }
  /*! \brief This rank's index in the team. */
  int index() const { return me_; }
  int rank(int index) const { return ranks_[index]; }

  /*! \brief The buffer to fill for the next step. */
  uint8_t* NextBuffer() const { return Buffer(me_, step_ + 1); }
  /*!
   * \brief Ask for the next buffer's cache lines, which the peers have; they have read it. They
   *        arrive while this step's data is used, not while the next step's is written.
   */
  void ClaimNextBuffer(size_t bytes) const {
#if defined(__x86_64__)
    const uint8_t* buffer = NextBuffer();
    for (size_t at = 0; at < bytes; at += kLine) asm volatile("prefetchw %0" : : "m"(buffer[at]));
#endif
  }
  /*! \brief The next step: publish, and wait for every peer. Throws when they disagree. */
  void Enter(const Descriptor& mine);
  /*! \brief What a member showed in the last step. */
  const Descriptor& shown(int index) const { return seat(index).slot[step_ & 1].descriptor; }
  const uint8_t* buffer(int index) const { return Buffer(index, step_); }
  const uint8_t* memory(int index, int64_t offset) const {
    return segments_->base(ranks_[index]) + offset;
  }
  /*! \brief Start again at step 0, as every member does after a recovery. */
  void Restart() { step_ = 0; }
  /*! \brief For tests: steps wrap after 2^32; every member sets the same, with the group idle. */
  void SkipTo(uint32_t step);

 private:
  Seat& seat(int index) const { return segments_->control().seats[row_][ranks_[index]]; }
  uint8_t* Buffer(int index, uint32_t step) const {
    return segments_->base(ranks_[index]) + (2 * row_ + (step & 1)) * kStageBytes;
  }
  [[noreturn]] void FailDeadline(const Descriptor& mine) const;
  [[noreturn]] void FailMismatch() const;

  std::shared_ptr<Segments> segments_;
  int row_;
  std::vector<int> ranks_;
  int me_;
  const RankOptions& options_;
  uint32_t step_ = 0;
};

/*! \brief One worker of a session, owned by the worker's thread. */
class Rank {
 public:
  /*!
   * \param connection To the controller's hub.
   * \param segment This rank's own file, to commit pages of the arena.
   */
  Rank(int id, std::shared_ptr<Segments> segments, RankOptions options,
       std::shared_ptr<Connection> connection, File segment);
  ~Rank();
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  int id() const { return id_; }
  int num_ranks() const { return num_ranks_; }
  int group_size() const { return group_size_; }
  const RankOptions& options() const { return options_; }
  Control& control() const { return segments_->control(); }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  const std::shared_ptr<Segments>& segments() const { return segments_; }

  /*! \brief The team of an operation that is about to start, ready for it. */
  Team& Begin(bool in_group);
  /*! \brief Throw if the session cannot go on; start again after a recovery. */
  void CheckSession();

  /*! \brief The start of this rank's arena. */
  uint8_t* arena_base() const;
  /*! \brief Where [data, data + bytes) lies in this rank's segment, or -1. */
  int64_t OffsetOf(const void* data, size_t bytes) const;

  /*! \brief The next packet number of a link. */
  uint32_t& packets_sent(int to) { return sent_[to]; }
  uint32_t& packets_received(int from) { return received_[from]; }
  uint8_t* packet_buffer(int src, int dst, uint32_t packet) const;

  /*! \brief Set once the rank says goodbye; the end of the connection means nothing then. */
  const std::shared_ptr<std::atomic<bool>>& left() const { return left_; }

  /*! \brief Whether this is the copy of a rank in a process that was forked off its worker. */
  bool forked() const { return connection_->forked(); }

  /*! \brief End the waits of all ranks, since this one failed. */
  void FailSession();
  Connection& connection() const { return *connection_; }

 private:
  int id_;
  int num_ranks_;
  int group_size_;
  std::shared_ptr<Segments> segments_;
  RankOptions options_;
  std::shared_ptr<Connection> connection_;
  std::shared_ptr<std::atomic<bool>> left_ = std::make_shared<std::atomic<bool>>(false);
  Team world_;
  Team group_;
  uint32_t generation_ = 0;
  std::vector<uint32_t> sent_;
  std::vector<uint32_t> received_;
  std::shared_ptr<Arena> arena_;
};

/*! \brief The rank of the calling thread, nullptr if it has none. */
Rank* CurrentRank();
/*! \brief Give the calling thread a rank, or take it away with nullptr. */
void SetCurrentRank(std::unique_ptr<Rank> rank);

/*! \brief Set the reason unless there is one, and wake everybody who waits. */
void Abort(Control& control, AbortReason reason, int rank);
/*! \brief Undo it: every rank starts again at step 0. All live, and none is in an operation. */
void StartAgain(Control& control);
/*! \brief "rank 2 failed" and the like. */
std::string DescribeAbort(const Control& control);
/*! \brief "allreduce(sum) of 12 x float32" and the like. */
std::string Describe(const Descriptor& descriptor);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_GROUP_H_
