/* SPDX-License-Identifier: Apache-2.0 */
/*! \file reduce_plan.cc */
#include "mpi/reduce_plan.h"

#include "core/wire.h"

namespace tvm_ipc {

namespace {

/*! \brief Up to here one lane is enough: more of them are more messages. */
constexpr size_t kOneLaneBytes = 16 << 10;
/*! \brief Up to here the time of a second hop is more than that of the bytes it saves. */
constexpr size_t kOneHopBytes = 64 << 10;
constexpr size_t kDepth = 3;

/*! \brief Part i of n of a range: whole lines, and the last ones have what is left. */
Range PartOf(Range range, int n, int i, size_t width) {
  const size_t line = kLine / width, parts = static_cast<size_t>(n);
  const size_t most = (range.count + line * parts - 1) / (line * parts) * line;
  const size_t begin = std::min(range.count, most * static_cast<size_t>(i));
  return {range.first + begin, std::min(range.count - begin, most)};
}

}  // namespace

ReducePlan::ReducePlan(const Layout& layout, const Combine& combine, Wanted wanted, size_t count,
                       size_t width)
    : width(width), layout_(layout), wanted_(wanted) {
  const bool in_parts = wanted.who == Wanted::kInParts;
  for (const Layout::Node& node : layout.nodes) {
    if (in_parts) rows_.insert(rows_.end(), node.places.begin(), node.places.end());
  }
  if (!in_parts) rows_ = {0};
  row_ = count / rows_.size();
  const size_t bytes = count * width;
  const size_t nodes = layout.nodes.size();
  const size_t most = combine.MostSaid();
  lanes_ = bytes <= kOneLaneBytes ? 1 : layout.lanes;
  // Half of a staging buffer is for what comes out. What a lane says of a piece fits a message, for
  // the parts of nodes and lanes, in whole lines, are as large as any other's, but in the last one.
  const size_t lanes = static_cast<size_t>(lanes_);
  const size_t line = kLine / width * lanes * (in_parts ? 1 : nodes);
  per_piece_ = std::min(kStageBytes / 2 / width, kMessageBytes / most * lanes) / rows_.size();
  per_piece_ = per_piece_ / line * line;
  pieces_ = std::max<size_t>(1, (row_ + per_piece_ - 1) / per_piece_);
  two_hops_ = !in_parts && bytes > kOneHopBytes && most + width < nodes * most;
  middle_ = two_hops_ ? std::min<size_t>(2, pieces_) : 0;
  depth_ = two_hops_ ? 2 * middle_ : std::min(kDepth, pieces_);
}

Range ReducePlan::Ends(size_t piece, int node, int lane) const {
  Range ended = Piece(piece);
  if (wanted_.who == Wanted::kInParts) {
    const size_t row_count = RowCount(piece);
    for (int before = 0; before < node; ++before) {
      ended.first += static_cast<size_t>(layout_.nodes[before].size()) * row_count;
    }
    ended.count = static_cast<size_t>(layout_.nodes[node].size()) * row_count;
  } else if (two_hops_) {
    ended = PartOf(ended, static_cast<int>(layout_.nodes.size()), node, width);
  } else if (!Told(node)) {
    ended.count = 0;
  }
  return PartOf(ended, lanes_, lane, width);
}

}  // namespace tvm_ipc
