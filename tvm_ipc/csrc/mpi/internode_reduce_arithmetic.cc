/* SPDX-License-Identifier: Apache-2.0 */
/*! \file internode_reduce_arithmetic.cc */
#include "mpi/internode_reduce_arithmetic.h"

#include <algorithm>

namespace tvm_ipc {

namespace {

/*!
 * \brief Return whether trees over the members of each node, and a tree over the nodes, make up the
 *        tree over the team: nodes have consecutive members, their number is the same power of two,
 *        and only the last node may have fewer.
 */
bool NodesAreSubtrees(const NodeLayout& layout) {
  const int size = layout.nodes[0].size();
  if ((size & (size - 1)) != 0) return false;
  int next = 0;
  for (const NodeLayout::Node& node : layout.nodes) {
    if (next % size != 0 || node.size() > size) return false;
    for (int member : node.members) {
      if (member != next++) return false;
    }
  }
  return true;
}

}  // namespace

Combine::Combine(const char* operation, ElementType type, ReduceKind kind, const NodeLayout& layout,
                 bool flat)
    : layout_(layout),
      type_(type),
      flat_(flat || (kind == ReduceKind::kTreeSum && !NodesAreSubtrees(layout))),
      reduce_(RequireReduce(operation, type, kind)),
      partial_(operation, type, kind) {}

size_t Combine::LargestContribution() const {
  size_t most = 0;
  for (size_t i = 0; i < layout_.nodes.size(); ++i) {
    most = std::max(most, ContributionBytes(static_cast<int>(i)));
  }
  return most;
}

void Combine::Contribute(uint8_t* to, const void* const* sources, size_t count) const {
  const int members = layout_.nodes[layout_.here].size();
  if (!flat_) return partial_.Fold(to, sources, members, count);
  const size_t row = count * type_.bytes();
  for (int i = 0; i < members; ++i) {
    CopyBytes(to + static_cast<size_t>(i) * row, sources[i], row, false);
  }
}

void Combine::Finish(void* dst, const uint8_t* const* contributions, size_t count) const {
  const void* all[kMaxRanks];
  if (!flat_) {
    for (size_t i = 0; i < layout_.nodes.size(); ++i) all[i] = contributions[i];
    return partial_.Finish(dst, all, static_cast<int>(layout_.nodes.size()), count, layout_.size());
  }
  const size_t row = count * type_.bytes();
  for (int place = 0; place < layout_.size(); ++place) {
    all[place] =
        contributions[layout_.node_of[place]] + static_cast<size_t>(layout_.index_of[place]) * row;
  }
  reduce_(dst, all, layout_.size(), count, false);
}

}  // namespace tvm_ipc
