/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file lane.h
 * \brief One lane of a reduction between nodes: one member of each node, which together reduce one
 *        part of each piece.
 */
#ifndef TVM_IPC_MPI_LANE_H_
#define TVM_IPC_MPI_LANE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mpi/across.h"
#include "mpi/combine.h"
#include "mpi/reduce_plan.h"

namespace tvm_ipc {

/*! \brief The member's work for its lane. Pieces are started, and ended, in their order. */
class Lane {
 public:
  Lane(RankWire& wire, Across& across, const Descriptor& mine, const Combine& combine,
       const ReducePlan& plan, int lane);

  /*!
   * \brief Say what the members of this node have. The sources are their pieces; of an only member,
   *        all that it sends, from where the elements of the piece are read.
   */
  void Start(size_t piece, const uint8_t* const* sources);
  /*! \brief End this node's part, and say what it came to, where there are two hops. */
  void Middle(size_t piece);
  /*! \brief Put what was ended, and is wanted here, where it is in the piece at dst. */
  void End(size_t piece, uint8_t* dst);

 private:
  /*! \brief What a piece that has started has in the wire. */
  struct Flight {
    /*! \brief By the index of a node. */
    std::vector<Messages::Coming> said, ended;
    /*! \brief Where what this node says to itself is in its buffer. */
    size_t own = 0;
    std::vector<WireTicket> sent;
  };

  int nodes() const { return static_cast<int>(layout_.nodes.size()); }
  size_t Buffer(size_t piece, size_t number) const {
    return piece % plan_.depth() * per_piece_ + number;
  }
  Flight& FlightOf(size_t piece) { return flights_[piece % plan_.depth()]; }
  template <typename Call>
  void ForOthers(Call call) const {
    for (int k = 1; k < nodes(); ++k) {  // each begins with another one
      const int node = (layout_.here + k) % nodes();
      call(node, layout_.RankOn(node, lane_));
    }
  }
  bool Speaks(size_t piece, int node) const { return plan_.Speaks(piece, node, lane_); }
  size_t Say(size_t piece, const uint8_t* const* sources, int node, size_t at);
  void EndOwn(size_t piece, uint8_t* dst);

  const Layout& layout_;
  const Combine& combine_;
  const ReducePlan& plan_;
  const int lane_;
  const size_t per_piece_;
  Messages messages_;
  std::vector<Flight> flights_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_LANE_H_
