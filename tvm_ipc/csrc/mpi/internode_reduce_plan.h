/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_reduce_plan.h
 * \brief The plan of a reduction between nodes: the pieces, which node finishes which elements of a
 *        piece, and which nodes get the results. All members compute the same plan.
 *
 * A node sends to another only its data of the elements that the other one finishes. With N nodes,
 * s bytes sent for an element, w bytes of an element itself and n elements:
 *
 *   one hop, wanted by all     each node finishes everything itself; it sends (N - 1) s n bytes
 *   one hop, wanted by one     that node finishes everything; every other sends s n bytes
 *   one hop, wanted in slices  each finishes what its members want, and sends s bytes for every
 *                              other element
 *   two hops                   each finishes an equal share and sends the results to those that
 *                              want them, all or one; used where a link carries fewer bytes
 *
 * The results are bitwise identical. In the first piece each node sends a message to every other
 * one, even without data, so that all nodes check that they are in the same operation.
 */
#ifndef TVM_IPC_MPI_INTERNODE_REDUCE_PLAN_H_
#define TVM_IPC_MPI_INTERNODE_REDUCE_PLAN_H_

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/team_members_by_node.h"
#include "mpi/internode_reduce_arithmetic.h"

namespace tvm_ipc {

/*! \brief Which members want the results. */
struct ResultRecipients {
  enum Who {
    kByAll,
    /*! \brief One member wants all results. */
    kByOne,
    /*! \brief Each member wants an equal slice, in team order. */
    kInParts,
  };
  Who who = kByAll;
  /*! \brief The team index of that member. */
  int place = 0;
};

/*! \brief Elements of a piece. */
struct Range {
  size_t first = 0;
  size_t count = 0;
};

class ReducePlan {
 public:
  ReducePlan(const NodeLayout& layout, const Combine& combine, ResultRecipients wanted,
             size_t count, size_t width);

  /*! \brief Bytes of an element. */
  const size_t width;
  /*! \brief Return the number of members of each node that share its work. */
  int slices() const { return slices_; }
  size_t pieces() const { return pieces_; }
  bool two_hops() const { return two_hops_; }
  /*! \brief How many pieces later the parts of a piece are reduced, and how many later it ends. */
  size_t middle() const { return middle_; }
  size_t depth() const { return depth_; }

  Range Piece(size_t piece) const { return {0, rows_.size() * RowCount(piece)}; }
  /*! \brief Return the elements of a piece that a slice leader of a node (an index) finishes. */
  Range Ends(size_t piece, int node, int slice) const;
  /*! \brief Return whether all nodes finish the same elements, so that all get the same data. */
  bool same() const { return wanted_.who == ResultRecipients::kByAll && !two_hops_; }
  /*! \brief Return whether there are messages for the elements that a slice leader finishes. */
  bool HasMessages(size_t piece, int node, int slice) const {
    return piece == 0 || Ends(piece, node, slice).count != 0;
  }
  /*! \brief Return whether a node gets the results of other nodes, in a second hop. */
  bool GetsResults(int node) const {
    return wanted_.who == ResultRecipients::kByAll || node == layout_.node_of[wanted_.place];
  }
  /*! \brief Return whether this node has the results of a node in the end. */
  bool Has(int node) const { return two_hops_ ? GetsResults(layout_.here) : node == layout_.here; }

  /*!
   * \brief Call `call` for each run of consecutive elements of a range, with its position in the
   *        reduced buffer, its position in the piece, and its length.
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

  const NodeLayout& layout_;
  const ResultRecipients wanted_;
  /*!
   * \brief The rows of the buffer, which have equal lengths; a piece has elements of each row. With
   *        kInParts they are the members' slices, node by node; otherwise there is one row.
   */
  std::vector<int> rows_;
  size_t row_;
  size_t per_piece_;
  int slices_;
  size_t pieces_;
  bool two_hops_;
  size_t middle_;
  size_t depth_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_INTERNODE_REDUCE_PLAN_H_
