/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_across.cc
 * \brief The pieces of a reduction across nodes, on one node.
 *
 * In the step for piece p all members of the node show their elements of it, each in the first half
 * of a staging buffer; an only member's stay where they lie. Then the owner of each lane reads its
 * part of them and says it to the nodes that end it (lane.h). It ends its part of a piece that has
 * been under way for some steps, in the second half of a staging buffer, and shows that in the same
 * step as the elements of a later piece; all who want it copy it from there. So cores reduce while
 * the network is busy, and there are as many steps as pieces, and a few.
 *
 * Staging buffers are those of shm/team.h, whose invariant holds: what is shown in a step is read
 * before the next one but one. What is ended is written where nobody reads what was sent, so recv
 * may be send: elements of a piece are copied out after they were shown, or said. No exit step is
 * needed.
 */
#include "mpi/reduce_across.h"

#include <algorithm>
#include <optional>

#include "mpi/lane.h"

namespace tvm_ipc {

void ReduceAcross(RankWire& wire, Across& across, const Buffer& send, const Descriptor& mine,
                  Wanted wanted, Sink& sink) {
  constexpr size_t kResult = kStageBytes / 2;
  const Layout& layout = across.layout();
  Team& team = across.team();
  const size_t width = send.type.bytes();
  const Combine combine(mine.op.text, send.type, mine.kind, layout, across.rank().options().flat);
  const ReducePlan plan(layout, combine, wanted, send.count, width);
  std::optional<Lane> lane;
  if (team.index() < plan.lanes()) lane.emplace(wire, across, mine, combine, plan, team.index());

  const bool alone = team.size() == 1;
  const uint8_t* sources[kMaxRanks] = {send.begin()};
  for (size_t turn = 0; turn < plan.pieces() + plan.depth(); ++turn) {
    const bool starts = turn < plan.pieces();
    const bool ends = turn >= plan.depth();
    const size_t ended = turn - plan.depth();
    const size_t half = turn - plan.middle();
    if (lane && plan.two_hops() && turn >= plan.middle() && half < plan.pieces()) {
      lane->Middle(half);
    }
    if (!starts && !ends) continue;
    if (starts && !alone) {
      plan.ForRuns(turn, plan.Piece(turn), [&](size_t element, size_t at, size_t count) {
        CopyBytes(team.NextBuffer() + at * width, send.begin() + element * width, count * width,
                  false);
      });
    }
    if (lane && ends) lane->End(ended, team.NextBuffer() + kResult);
    across.Enter(mine);
    if (lane && starts) {
      for (int i = 0; !alone && i < team.size(); ++i) sources[i] = team.buffer(i);
      lane->Start(turn, sources);
    }
    if (!ends) continue;
    for (int node = 0; node < static_cast<int>(layout.nodes.size()); ++node) {
      for (int i = 0; plan.Has(node) && i < plan.lanes(); ++i) {
        const uint8_t* results = team.buffer(i) + kResult;
        plan.ForRuns(ended, plan.Ends(ended, node, i), [&](size_t element, size_t at, size_t n) {
          sink.Copy(element, results + at * width, n);
        });
      }
    }
  }
}

}  // namespace tvm_ipc
