/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file pipelined_internode_reduce.cc
 * \brief The pieces of a reduction across nodes, on one node.
 *
 * In the step for piece p all members of the node expose their elements of it, each in the first
 * half of a staging buffer. A node's only member reads directly from its input. Then the leader of
 * each slice reads its slice and sends it to the nodes that finish it (reduction_slice_leader.h).
 * It also finishes its slice of an earlier piece that has been in flight for some steps, in the
 * second half of a staging buffer, and exposes that in the same step as the elements of a later
 * piece. Members copy the results from there. So cores reduce while the network transfers, and
 * there are only a few more steps than pieces.
 *
 * The invariant of the staging buffers (core/collective_step_barrier.h) holds: data exposed in a
 * step is read before the step after the next. Results never overwrite data that is still read, so
 * recv may be send: elements of a piece are copied out after they were exposed or sent. No exit
 * step is needed.
 */
#include "mpi/pipelined_internode_reduce.h"

#include <algorithm>
#include <optional>

#include "mpi/reduction_slice_leader.h"

namespace tvm_ipc {

void ReduceInternode(InternodeRing& ring, InternodeTeam& internode_team, const Buffer& send,
                     const Descriptor& mine, ResultRecipients wanted, Sink& sink) {
  constexpr size_t kResult = kStageBytes / 2;
  const NodeLayout& layout = internode_team.layout();
  Team& team = internode_team.team();
  const size_t width = send.type.bytes();
  const Combine combine(mine.op.text, send.type, mine.kind, layout,
                        internode_team.rank().options().flat);
  const ReducePlan plan(layout, combine, wanted, send.count, width);
  std::optional<SliceLeader> slice;
  if (team.index() < plan.slices())
    slice.emplace(ring, internode_team, mine, combine, plan, team.index());

  const bool alone = team.size() == 1;
  const uint8_t* sources[kMaxRanks] = {send.begin()};
  for (size_t guard = 0; guard < plan.pieces() + plan.depth(); ++guard) {
    const bool starts = guard < plan.pieces();
    const bool ends = guard >= plan.depth();
    const size_t ended = guard - plan.depth();
    const size_t half = guard - plan.middle();
    if (slice && plan.two_hops() && guard >= plan.middle() && half < plan.pieces()) {
      slice->Middle(half);
    }
    if (!starts && !ends) continue;
    if (starts && !alone) {
      plan.ForRuns(guard, plan.Piece(guard), [&](size_t element, size_t at, size_t count) {
        CopyBytes(team.NextBuffer() + at * width, send.begin() + element * width, count * width,
                  false);
      });
    }
    if (slice && ends) slice->End(ended, team.NextBuffer() + kResult);
    internode_team.Enter(mine);
    if (slice && starts) {
      for (int i = 0; !alone && i < team.size(); ++i) sources[i] = team.buffer(i);
      slice->Start(guard, sources);
    }
    if (!ends) continue;
    for (int node = 0; node < static_cast<int>(layout.nodes.size()); ++node) {
      for (int i = 0; plan.Has(node) && i < plan.slices(); ++i) {
        const uint8_t* results = team.buffer(i) + kResult;
        plan.ForRuns(ended, plan.Ends(ended, node, i), [&](size_t element, size_t at, size_t n) {
          sink.Copy(element, results + at * width, n);
        });
      }
    }
  }
}

}  // namespace tvm_ipc
