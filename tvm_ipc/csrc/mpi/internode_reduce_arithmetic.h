/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_reduce_arithmetic.h
 * \brief The data that nodes send to each other in a reduction, and its combination. Results are
 *        bitwise identical on every rank, in one of two orders:
 *
 *   by nodes   a node sends a partial result of its members' elements, in float32 or wider
 *              (shm/reduce_in_groups_round_once.h); the partials are added in node order and
 *              rounded once
 *   flat       a node sends the elements of each of its members; all are reduced in rank order,
 *              with the same bits as on one machine
 *
 * tree_sum has the bits of one machine in both: it goes by nodes only where each node's members are
 * a subtree.
 */
#ifndef TVM_IPC_MPI_INTERNODE_REDUCE_ARITHMETIC_H_
#define TVM_IPC_MPI_INTERNODE_REDUCE_ARITHMETIC_H_

#include <cstddef>
#include <cstdint>

#include "core/element_type_and_reduce_kind.h"
#include "core/team_members_by_node.h"
#include "shm/reduce_in_groups_round_once.h"
#include "shm/select_kernels_by_instruction_set.h"

namespace tvm_ipc {

class Combine {
 public:
  Combine(const char* operation, ElementType type, ReduceKind kind, const NodeLayout& layout,
          bool flat);

  /*! \brief Return the bytes that a node (by its index) sends for one element. */
  size_t ContributionBytes(int node) const {
    return flat_ ? layout_.nodes[node].members.size() * type_.bytes() : partial_.width();
  }
  /*! \brief Return the largest ContributionBytes of any node. */
  size_t LargestContribution() const;
  /*! \brief Compute what this node sends for some elements of its members. */
  void Contribute(uint8_t* to, const void* const* sources, size_t count) const;
  /*! \brief Compute the result from what all nodes have sent for some elements. */
  void Finish(void* dst, const uint8_t* const* contributions, size_t count) const;

 private:
  const NodeLayout& layout_;
  const ElementType type_;
  const bool flat_;
  const ReduceFn reduce_;
  const Partial partial_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_INTERNODE_REDUCE_ARITHMETIC_H_
