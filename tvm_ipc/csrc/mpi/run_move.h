/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file run_move.h
 * \brief Collectives that only move data, across nodes: one executor of a plan that all members
 *        know.
 */
#ifndef TVM_IPC_MPI_RUN_MOVE_H_
#define TVM_IPC_MPI_RUN_MOVE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mpi/across.h"

namespace tvm_ipc {

/*! \brief Bytes that go from one member to some members. */
struct Stream {
  /*! \brief By its place. */
  int source = 0;
  /*! \brief A bit for the place of each. */
  uint64_t to = 0;
  size_t bytes = 0;
  /*! \brief Where they begin in what the source sends. */
  size_t from = 0;
  /*! \brief Where they begin in what this member receives, if it is one of these. */
  size_t into = 0;
};
static_assert(kMaxRanks <= 64, "a bit for each");

/*!
 * \brief Do all streams. All members have the same ones in the same order, but for `into`; from one
 *        member to another there is one at most.
 * \param send Null where this member is no source; a part of it may lie where it is received.
 */
void RunMove(RankWire& wire, Across& across, const Descriptor& mine,
             const std::vector<Stream>& streams, const uint8_t* send, uint8_t* recv);

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_RUN_MOVE_H_
