/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file combine.h
 * \brief What a node says to others of a reduction, and what they make of it: the same bits on
 *        every rank, in one of two orders.
 *
 *   by nodes   a node says a partial of its members' elements, in float32 or wider (shm/partial.h);
 *              the partials are summed in the order of the nodes, and rounded once
 *   flat       a node says the elements of each of its members; all are reduced in the order of
 *              the ranks, and have the bits that one machine would give
 */
#ifndef TVM_IPC_MPI_COMBINE_H_
#define TVM_IPC_MPI_COMBINE_H_

#include <cstddef>
#include <cstdint>

#include "core/element.h"
#include "core/layout.h"
#include "shm/partial.h"
#include "shm/reduce.h"

namespace tvm_ipc {

class Combine {
 public:
  Combine(const char* operation, ElementType type, ReduceKind kind, const Layout& layout,
          bool flat);

  /*! \brief Bytes that a node, by its index, says of one element. */
  size_t Said(int node) const {
    return flat_ ? layout_.nodes[node].places.size() * type_.bytes() : partial_.width();
  }
  /*! \brief The most that any node says. */
  size_t MostSaid() const;
  /*! \brief What this node says of some elements of its members. */
  void Say(uint8_t* to, const void* const* sources, size_t count) const;
  /*! \brief The result of what all nodes say of some elements. */
  void End(void* dst, const uint8_t* const* said, size_t count) const;

 private:
  const Layout& layout_;
  const ElementType type_;
  const bool flat_;
  const ReduceFn reduce_;
  const Partial partial_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_COMBINE_H_
