/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file run_move.h
 * \brief Runs collectives that only move data between nodes, from a plan that all members
 *        know.
 */
#ifndef TVM_IPC_MPI_RUN_MOVE_H_
#define TVM_IPC_MPI_RUN_MOVE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mpi/internode_team_local_barrier.h"

namespace tvm_ipc {

/*! \brief Bytes that one member sends to some members. */
struct Stream {
  /*! \brief The source's team index. */
  int source = 0;
  /*! \brief A bit for each member's team index. */
  uint64_t to = 0;
  size_t bytes = 0;
  /*! \brief The offset in the source's input. */
  size_t from = 0;
  /*! \brief The offset in this member's output, if it is a receiver. */
  size_t into = 0;
};
static_assert(kMaxRanks <= 64, "a bit for each");

/*!
 * \brief Run all streams. All members pass the same ones in the same order, except for `into`.
 * There is at most one stream from one member to another.
 * \param send Null if this member is no source. A slice of it may be at its position in the output.
 */
void RunMove(InternodeRing& ring, InternodeTeam& internode_team, const Descriptor& mine,
             const std::vector<Stream>& streams, const uint8_t* send, uint8_t* recv);

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_RUN_MOVE_H_
