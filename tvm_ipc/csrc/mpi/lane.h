/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file lane.h
 * \brief One lane of a reduction between nodes: one member of each node, which together reduce one
 *        slice of each piece.
 */
#ifndef TVM_IPC_MPI_LANE_H_
#define TVM_IPC_MPI_LANE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "mpi/across.h"
#include "mpi/combine.h"

namespace tvm_ipc {

/*! \brief Where part i of n begins: whole lines, and the last ones have what is left. */
inline size_t PartStart(size_t count, int n, int i, size_t width) {
  const size_t line = kLine / width;
  const size_t parts = static_cast<size_t>(n);
  return std::min(count,
                  (count + line * parts - 1) / (line * parts) * line * static_cast<size_t>(i));
}

/*! \brief How a reduction goes; all members come to the same. */
struct ReducePlan {
  ReducePlan(const Layout& layout, const Combine& combine, size_t count, size_t width);

  /*! \brief Bytes of an element. */
  size_t width;
  int lanes;
  /*! \brief Elements, the last one has what is left; and how many. */
  size_t piece;
  size_t pieces;
  /*!
   * \brief Whether each node reduces a part of the slice and sends the others the result; else all
   *        say all of it to all.
   */
  bool two_hops;
  /*! \brief After how many others a piece's parts are reduced, and after how many it ends. */
  size_t middle;
  size_t depth;
};

/*! \brief The member's work for its lane. Pieces are started, and ended, in their order. */
class Lane {
 public:
  Lane(RankWire& wire, Across& across, const Descriptor& mine, const Combine& combine,
       const ReducePlan& plan, int lane);

  /*! \brief Say what the members of this node have in a slice. */
  void Start(size_t piece, const void* const* sources, size_t count);
  /*! \brief Reduce this node's part of it, where there are two hops. */
  void Middle(size_t piece);
  /*! \brief dst = the slice's reduction. */
  void End(size_t piece, uint8_t* dst);

 private:
  /*! \brief What a piece that has started has in the wire. */
  struct Flight {
    size_t count = 0;
    /*! \brief By the index of a node. */
    std::vector<Messages::Coming> said, reduced;
    /*! \brief Where what this node says to itself is in its buffer. */
    size_t own = 0;
    std::vector<WireTicket> sent;
  };

  int nodes() const { return static_cast<int>(layout_.nodes.size()); }
  size_t Buffer(size_t piece, size_t number) const {
    return piece % plan_.depth * per_piece_ + number;
  }
  size_t Part(const Flight& flight, int node) const {
    return PartStart(flight.count, nodes(), node, plan_.width);
  }
  size_t PartCount(const Flight& flight, int node) const {
    return Part(flight, node + 1) - Part(flight, node);
  }
  template <typename Call>
  void ForOthers(Call call) const {
    for (int k = 1; k < nodes(); ++k) {  // each begins with another one
      const int node = (layout_.here + k) % nodes();
      call(node, layout_.RankOn(node, lane_));
    }
  }
  void TakeSaid(size_t piece, size_t count, const uint8_t** said);

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
