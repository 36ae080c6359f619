/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file across.h
 * \brief One operation of a team across nodes, seen from a member: the meeting of the members on
 *        this node, and messages to and from other nodes.
 *
 * A message begins with the descriptor of the operation, so that nodes which disagree get an error
 * that says what each of them called. Every receive has room for the longest message there is.
 */
#ifndef TVM_IPC_MPI_ACROSS_H_
#define TVM_IPC_MPI_ACROSS_H_

#include <cstddef>
#include <cstdint>

#include "core/wire.h"
#include "mpi/layout.h"
#include "shm/team.h"

namespace tvm_ipc {

/*! \brief Bytes of a message before what it says. */
constexpr size_t kMessageHead = kLine;

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

/*! \brief The messages of a member in an operation, numbered by whoever sends and receives them. */
class Messages {
 public:
  struct Coming {
    WireTicket ticket;
    size_t buffer = 0;
    int from = 0;
  };

  /*! \param buffers Of the wire, as many as it takes. */
  Messages(RankWire& wire, Across& across, const Descriptor& mine, size_t buffers);

  /*! \brief Where a message's bytes are to be, `at` bytes from the buffer's begin. */
  uint8_t* Body(size_t buffer, size_t at = 0) const {
    return use_.buffer(buffer) + at + kMessageHead;
  }
  /*! \brief Send what is in the body to a rank of another node. */
  WireTicket Send(int to, WirePhase phase, int64_t number, size_t buffer, size_t at, size_t bytes);
  /*! \brief Give a buffer for what a rank of another node sends. */
  Coming Receive(int from, WirePhase phase, size_t buffer);
  /*! \brief Wait until a message was sent. */
  void Await(const WireTicket& ticket) { use_.Await(ticket); }
  /*! \brief Wait for what comes, which has to be of this operation; its body. */
  const uint8_t* Take(const Coming& coming, int64_t number, size_t bytes);
  void Ring() { use_.Ring(); }

 private:
  int NodeOf(int rank) const { return across_.rank().control().NodeOf(rank); }

  Across& across_;
  const Descriptor mine_;
  WireUse use_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_ACROSS_H_
