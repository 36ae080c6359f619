/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduction_slice_leader.h
 * \brief The leader of a slice in a reduction between nodes. One leader of each node together
 * reduce one slice of each piece.
 */
#ifndef TVM_IPC_MPI_REDUCTION_SLICE_LEADER_H_
#define TVM_IPC_MPI_REDUCTION_SLICE_LEADER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mpi/internode_reduce_arithmetic.h"
#include "mpi/internode_reduce_plan.h"
#include "mpi/internode_team_local_barrier.h"

namespace tvm_ipc {

/*! \brief The work of a slice leader. Pieces are started, and finished, in order. */
class SliceLeader {
 public:
  SliceLeader(InternodeRing& ring, InternodeTeam& internode_team, const Descriptor& mine,
              const Combine& combine, const ReducePlan& plan, int slice);

  /*!
   * \brief Send the data of this node's members. The sources are their pieces; for a node's only
   *        member its whole input, from which the piece is read.
   */
  void Start(size_t piece, const uint8_t* const* sources);
  /*! \brief Finish this node's elements, and send the results if there are two hops. */
  void Middle(size_t piece);
  /*! \brief Copy the results that this node wants to their positions in the piece at dst. */
  void End(size_t piece, uint8_t* dst);

 private:
  /*! \brief The messages in flight of a piece. */
  struct PieceInFlight {
    /*! \brief The messages of each node, by node index. */
    std::vector<Messages::Incoming> contributions, ended;
    /*! \brief The offset of this node's data for itself in its buffer. */
    size_t own = 0;
    std::vector<RingTicket> sent;
  };

  int nodes() const { return static_cast<int>(layout_.nodes.size()); }
  size_t Buffer(size_t piece, size_t number) const {
    return piece % plan_.depth() * per_piece_ + number;
  }
  PieceInFlight& InFlightOf(size_t piece) { return in_flight_[piece % plan_.depth()]; }
  template <typename Call>
  void ForOthers(Call call) const {
    for (int k = 1; k < nodes(); ++k) {  // each begins with a different node
      const int node = (layout_.here + k) % nodes();
      call(node, layout_.RankOn(node, slice_));
    }
  }
  bool HasMessages(size_t piece, int node) const { return plan_.HasMessages(piece, node, slice_); }
  size_t Contribute(size_t piece, const uint8_t* const* sources, int node, size_t at);
  void EndOwn(size_t piece, uint8_t* dst);

  const NodeLayout& layout_;
  const Combine& combine_;
  const ReducePlan& plan_;
  const int slice_;
  const size_t per_piece_;
  Messages messages_;
  std::vector<PieceInFlight> in_flight_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_REDUCTION_SLICE_LEADER_H_
