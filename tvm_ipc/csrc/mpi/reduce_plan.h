/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_plan.h
 * \brief How a reduction between nodes goes: in which pieces, which node ends which elements of a
 *        piece, and who is told what they came to. All members come to the same plan.
 *
 * A node says to another one what it has of the elements that the other one ends, and no more. With
 * N nodes, s bytes said of an element, w bytes of its own and n elements:
 *
 *   one hop, wanted by all     each node ends everything for itself; it sends (N - 1) s n bytes
 *   one hop, wanted by one     that one ends everything; each other sends s n bytes
 *   one hop, wanted in parts   each ends what its members want; it sends s for each other element
 *   two hops                   each ends as much as any other, and sends what it came to to those
 *                              that want it, all or one; where that is fewer bytes for a link
 *
 * The bits are the same. In the first piece each node says something to each other one, be it that
 * it has nothing to say: so all of them know that they are in the same operation.
 */
#ifndef TVM_IPC_MPI_REDUCE_PLAN_H_
#define TVM_IPC_MPI_REDUCE_PLAN_H_

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/layout.h"
#include "mpi/combine.h"

namespace tvm_ipc {

/*! \brief Which members want the elements that come out. */
struct Wanted {
  enum Who {
    kByAll,
    /*! \brief One member wants all of them. */
    kByOne,
    /*! \brief Each member wants a part: as many as any other, in the order of their places. */
    kInParts,
  };
  Who who = kByAll;
  /*! \brief The place of the one. */
  int place = 0;
};

/*! \brief Elements of a piece. */
struct Range {
  size_t first = 0;
  size_t count = 0;
};

class ReducePlan {
 public:
  ReducePlan(const Layout& layout, const Combine& combine, Wanted wanted, size_t count,
             size_t width);

  /*! \brief Bytes of an element. */
  const size_t width;
  /*! \brief As many members of each node share its work. */
  int lanes() const { return lanes_; }
  size_t pieces() const { return pieces_; }
  bool two_hops() const { return two_hops_; }
  /*! \brief After how many others a piece's parts are reduced, and after how many it ends. */
  size_t middle() const { return middle_; }
  size_t depth() const { return depth_; }

  Range Piece(size_t piece) const { return {0, rows_.size() * RowCount(piece)}; }
  /*! \brief What a lane of a node, by its index, ends of a piece. */
  Range Ends(size_t piece, int node, int lane) const;
  /*! \brief Whether all nodes end the same, so that all are told the same. */
  bool same() const { return wanted_.who == Wanted::kByAll && !two_hops_; }
  /*! \brief Whether there are messages about what it ends. */
  bool Speaks(size_t piece, int node, int lane) const {
    return piece == 0 || Ends(piece, node, lane).count != 0;
  }
  /*! \brief Whether a node is told what others have ended, in a second hop. */
  bool Told(int node) const {
    return wanted_.who == Wanted::kByAll || node == layout_.node_of[wanted_.place];
  }
  /*! \brief Whether this node has, in the end, what a node has ended. */
  bool Has(int node) const { return two_hops_ ? Told(layout_.here) : node == layout_.here; }

  /*!
   * \brief Call with each run of elements of a range: where it is in the buffer that is reduced,
   *        where in the piece, and how many they are.
   */
  template <typename Call>
  void ForRuns(size_t piece, Range range, Call call) const {
    const size_t row_count = RowCount(piece), end = range.first + range.count;
    for (size_t at = range.first, count; at < end; at += count) {
      const size_t within = at % row_count;
      count = std::min(row_count - within, end - at);
      call(static_cast<size_t>(rows_[at / row_count]) * row_ + piece * per_piece_ + within, at,
           count);
    }
  }

 private:
  size_t RowCount(size_t piece) const {
    return std::min(per_piece_, row_ - std::min(row_, piece * per_piece_));
  }

  const Layout& layout_;
  const Wanted wanted_;
  /*!
   * \brief The buffer is rows of as many elements each, and a piece has some of each row. They are
   *        the parts of the members, node by node; else there is one row.
   */
  std::vector<int> rows_;
  size_t row_;
  size_t per_piece_;
  int lanes_;
  size_t pieces_;
  bool two_hops_;
  size_t middle_;
  size_t depth_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_REDUCE_PLAN_H_
