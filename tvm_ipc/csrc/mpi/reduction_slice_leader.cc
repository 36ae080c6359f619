/* SPDX-License-Identifier: Apache-2.0 */
/*! \file reduction_slice_leader.cc */
#include "mpi/reduction_slice_leader.h"

namespace tvm_ipc {

namespace {

size_t WholeLines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

SliceLeader::SliceLeader(InternodeRing& ring, InternodeTeam& internode_team, const Descriptor& mine,
                         const Combine& combine, const ReducePlan& plan, int slice)
    : layout_(internode_team.layout()),
      combine_(combine),
      plan_(plan),
      slice_(slice),
      per_piece_(layout_.nodes.size() * (plan.two_hops() ? 2 : 1)),
      messages_(ring, internode_team.layout(), internode_team.barrier(), mine,
                plan.depth() * per_piece_),
      in_flight_(plan.depth()) {}

void SliceLeader::Start(size_t piece, const uint8_t* const* sources) {
  PieceInFlight& piece_in_flight = InFlightOf(piece);
  piece_in_flight.contributions.resize(layout_.nodes.size());
  piece_in_flight.ended.resize(layout_.nodes.size());
  size_t buffer = 1;
  if (HasMessages(piece, layout_.here)) {
    ForOthers([&](int node, int rank) {
      piece_in_flight.contributions[node] =
          messages_.Receive(rank, kFirstPhase, Buffer(piece, buffer++));
    });
  }
  if (plan_.two_hops() && plan_.GetsResults(layout_.here)) {
    buffer = layout_.nodes.size() + 1;
    ForOthers([&](int node, int rank) {
      if (!HasMessages(piece, node)) return;
      piece_in_flight.ended[node] = messages_.Receive(rank, kSecondPhase, Buffer(piece, buffer++));
    });
  }
  size_t at = 0, next = 0;
  ForOthers([&](int node, int rank) {
    if (!HasMessages(piece, node)) return;
    if (next == 0 || !plan_.same()) {
      at = next;
      next = Contribute(piece, sources, node, at);
    }
    const size_t bytes =
        plan_.Ends(piece, node, slice_).count * combine_.ContributionBytes(layout_.here);
    piece_in_flight.sent.push_back(messages_.Send(rank, kFirstPhase, static_cast<int64_t>(piece),
                                                  Buffer(piece, 0), at, bytes));
  });
  messages_.WakeEngine();
  piece_in_flight.own = plan_.same() ? 0 : next;
  if (!plan_.same()) Contribute(piece, sources, layout_.here, next);
}

/*! \brief Write this node's contribution to the elements that `node` finishes; return the offset of
 *         the next contribution. */
size_t SliceLeader::Contribute(size_t piece, const uint8_t* const* sources, int node, size_t at) {
  const Range range = plan_.Ends(piece, node, slice_);
  const int members = layout_.nodes[layout_.here].size();
  const size_t contribution_bytes = combine_.ContributionBytes(layout_.here);
  uint8_t* to = messages_.Body(Buffer(piece, 0), at);
  const void* elements[kMaxRanks];
  if (members == 1) {
    plan_.ForRuns(piece, range, [&](size_t element, size_t in_piece, size_t count) {
      elements[0] = sources[0] + element * plan_.width;
      combine_.Contribute(to + (in_piece - range.first) * contribution_bytes, elements, count);
    });
  } else {
    for (int i = 0; i < members; ++i) elements[i] = sources[i] + range.first * plan_.width;
    combine_.Contribute(to, elements, range.count);
  }
  return at + kMessageHead + WholeLines(range.count * contribution_bytes);
}

/*! \brief dst = the result of all nodes' contributions to the elements that this node finishes. */
void SliceLeader::EndOwn(size_t piece, uint8_t* dst) {
  const PieceInFlight& piece_in_flight = InFlightOf(piece);
  const size_t count = plan_.Ends(piece, layout_.here, slice_).count;
  const uint8_t* contributions[kMaxNodes];
  ForOthers([&](int node, int) {
    contributions[node] =
        messages_.Take(piece_in_flight.contributions[node], static_cast<int64_t>(piece),
                       count * combine_.ContributionBytes(node));
  });
  contributions[layout_.here] = messages_.Body(Buffer(piece, 0), piece_in_flight.own);
  combine_.Finish(dst, contributions, count);
}

void SliceLeader::Middle(size_t piece) {
  if (!HasMessages(piece, layout_.here)) return;
  const size_t result = Buffer(piece, layout_.nodes.size());
  const size_t bytes = plan_.Ends(piece, layout_.here, slice_).count * plan_.width;
  EndOwn(piece, messages_.Body(result));
  ForOthers([&](int node, int rank) {
    if (!plan_.GetsResults(node)) return;
    InFlightOf(piece).sent.push_back(
        messages_.Send(rank, kSecondPhase, static_cast<int64_t>(piece), result, 0, bytes));
  });
  messages_.WakeEngine();
}

void SliceLeader::End(size_t piece, uint8_t* dst) {
  PieceInFlight& piece_in_flight = InFlightOf(piece);
  if (!plan_.two_hops()) {
    const size_t first = plan_.Ends(piece, layout_.here, slice_).first;
    if (HasMessages(piece, layout_.here)) EndOwn(piece, dst + first * plan_.width);
  } else if (plan_.GetsResults(layout_.here)) {
    auto copy = [&](const Range& range, const uint8_t* from) {
      CopyBytes(dst + range.first * plan_.width, from, range.count * plan_.width, false);
    };
    copy(plan_.Ends(piece, layout_.here, slice_),
         messages_.Body(Buffer(piece, layout_.nodes.size())));
    ForOthers([&](int node, int) {
      if (!HasMessages(piece, node)) return;
      const Range range = plan_.Ends(piece, node, slice_);
      copy(range, messages_.Take(piece_in_flight.ended[node], static_cast<int64_t>(piece),
                                 range.count * plan_.width));
    });
  }
  for (const RingTicket& ticket : piece_in_flight.sent) messages_.Await(ticket);
  piece_in_flight.sent.clear();
}

}  // namespace tvm_ipc
