/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_across.cc
 * \brief The pieces of a reduction across nodes, on one node.
 *
 * In the step for piece p all members of the node show their elements of it, each in the first half
 * of a staging buffer. Then the owner of each lane reads its slice of them and says it to the other
 * nodes (lane.h). It ends the slice of a piece that has been under way for some steps, in the
 * second half of a staging buffer, and shows that in the same step as the elements of a later
 * piece; all copy it from there. So cores reduce while the network is busy, and there are as many
 * steps as pieces, and a few.
 *
 * Staging buffers are those of shm/team.h, whose invariant holds: what is shown in a step is read
 * before the next one but one. What is ended is written where nobody reads what was sent, so recv
 * may be send: elements of a piece are copied out after they were shown. No exit step is needed.
 */
#include "mpi/reduce_across.h"

#include <algorithm>
#include <optional>

#include "mpi/lane.h"

namespace tvm_ipc {

void ReduceAcross(RankWire& wire, Across& across, const Buffer& send, const Descriptor& mine,
                  Sink& sink) {
  constexpr size_t kResult = kStageBytes / 2;
  const Layout& layout = across.layout();
  Team& team = across.team();
  const size_t width = send.type.bytes();
  const Combine combine(mine.op.text, send.type, mine.kind, layout, across.rank().options().flat);
  const ReducePlan plan(layout, combine, send.count, width);
  std::optional<Lane> lane;
  if (team.index() < plan.lanes) lane.emplace(wire, across, mine, combine, plan, team.index());

  auto count_of = [&](size_t piece) {
    return std::min(plan.piece, send.count - piece * plan.piece);
  };
  auto slice = [&](size_t piece, int i) {
    return PartStart(count_of(piece), plan.lanes, i, width);
  };
  const void* sources[kMaxRanks];
  for (size_t turn = 0; turn < plan.pieces + plan.depth; ++turn) {
    const bool starts = turn < plan.pieces;
    const bool ends = turn >= plan.depth;
    const size_t ended = turn - plan.depth;
    if (lane && plan.two_hops && turn >= plan.middle && turn - plan.middle < plan.pieces) {
      lane->Middle(turn - plan.middle);
    }
    if (!starts && !ends) continue;
    if (starts) {
      CopyBytes(team.NextBuffer(), send.begin() + turn * plan.piece * width, count_of(turn) * width,
                false);
    }
    if (lane && ends) lane->End(ended, team.NextBuffer() + kResult);
    across.Enter(mine);
    if (lane && starts) {
      const size_t start = slice(turn, team.index());
      for (int i = 0; i < team.size(); ++i) sources[i] = team.buffer(i) + start * width;
      lane->Start(turn, sources, slice(turn, team.index() + 1) - start);
    }
    for (int i = 0; ends && i < plan.lanes; ++i) {
      const size_t start = slice(ended, i);
      sink.Copy(ended * plan.piece + start, team.buffer(i) + kResult, slice(ended, i + 1) - start);
    }
  }
}

}  // namespace tvm_ipc
