/* SPDX-License-Identifier: Apache-2.0 */
/*! \file internode_reduce_plan.cc */
#include "mpi/internode_reduce_plan.h"

#include "core/internode_request_queue.h"

namespace tvm_ipc {

namespace {

/*! \brief Up to this size one slice is used, because more slices are more messages. */
constexpr size_t kOneSliceBytes = 16 << 10;
/*! \brief Up to this size a second hop takes longer than sending the bytes it saves. */
constexpr size_t kOneHopBytes = 64 << 10;
constexpr size_t kDepth = 3;

/*! \brief Return part i of n of a range, in whole cache lines; the last parts take the rest. */
Range PartOf(Range range, int n, int i, size_t width) {
  const size_t line = kLine / width, parts = static_cast<size_t>(n);
  const size_t most = (range.count + line * parts - 1) / (line * parts) * line;
  const size_t begin = std::min(range.count, most * static_cast<size_t>(i));
  return {range.first + begin, std::min(range.count - begin, most)};
}

}  // namespace

ReducePlan::ReducePlan(const NodeLayout& layout, const Combine& combine, ResultRecipients wanted,
                       size_t count, size_t width)
    : width(width), layout_(layout), wanted_(wanted) {
  const bool in_parts = wanted.who == ResultRecipients::kInParts;
  for (const NodeLayout::Node& node : layout.nodes) {
    if (in_parts) rows_.insert(rows_.end(), node.members.begin(), node.members.end());
  }
  if (!in_parts) rows_ = {0};
  row_ = count / rows_.size();
  const size_t bytes = count * width;
  const size_t nodes = layout.nodes.size();
  const size_t most = combine.LargestContribution();
  slices_ = bytes <= kOneSliceBytes ? 1 : layout.slices;
  // Half of a staging buffer is for results. A slice leader's data of a piece fits in a message,
  // because a piece has equal parts of whole lines for all nodes and slices, except the last piece.
  const size_t slices = static_cast<size_t>(slices_);
  const size_t line = kLine / width * slices * (in_parts ? 1 : nodes);
  per_piece_ = std::min(kStageBytes / 2 / width, kMessageBytes / most * slices) / rows_.size();
  per_piece_ = per_piece_ / line * line;
  pieces_ = std::max<size_t>(1, (row_ + per_piece_ - 1) / per_piece_);
  two_hops_ = !in_parts && bytes > kOneHopBytes && most + width < nodes * most;
  middle_ = two_hops_ ? std::min<size_t>(2, pieces_) : 0;
  depth_ = two_hops_ ? 2 * middle_ : std::min(kDepth, pieces_);
}

Range ReducePlan::Ends(size_t piece, int node, int slice) const {
  Range ended = Piece(piece);
  if (wanted_.who == ResultRecipients::kInParts) {
    const size_t row_count = RowCount(piece);
    for (int before = 0; before < node; ++before) {
      ended.first += static_cast<size_t>(layout_.nodes[before].size()) * row_count;
    }
    ended.count = static_cast<size_t>(layout_.nodes[node].size()) * row_count;
  } else if (two_hops_) {
    ended = PartOf(ended, static_cast<int>(layout_.nodes.size()), node, width);
  } else if (!GetsResults(node)) {
    ended.count = 0;
  }
  return PartOf(ended, slices_, slice, width);
}

}  // namespace tvm_ipc
