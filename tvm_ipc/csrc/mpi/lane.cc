/* SPDX-License-Identifier: Apache-2.0 */
/*! \file lane.cc */
#include "mpi/lane.h"

namespace tvm_ipc {

namespace {

size_t WholeLines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

Lane::Lane(RankWire& wire, Across& across, const Descriptor& mine, const Combine& combine,
           const ReducePlan& plan, int lane)
    : layout_(across.layout()),
      combine_(combine),
      plan_(plan),
      lane_(lane),
      per_piece_(layout_.nodes.size() * (plan.two_hops() ? 2 : 1)),
      messages_(wire, across.layout(), across.meeting(), mine, plan.depth() * per_piece_),
      flights_(plan.depth()) {}

void Lane::Start(size_t piece, const uint8_t* const* sources) {
  Flight& flight = FlightOf(piece);
  flight.said.resize(layout_.nodes.size());
  flight.ended.resize(layout_.nodes.size());
  size_t buffer = 1;
  if (Speaks(piece, layout_.here)) {
    ForOthers([&](int node, int rank) {
      flight.said[node] = messages_.Receive(rank, kFirstPhase, Buffer(piece, buffer++));
    });
  }
  if (plan_.two_hops() && plan_.Told(layout_.here)) {
    buffer = layout_.nodes.size() + 1;
    ForOthers([&](int node, int rank) {
      if (!Speaks(piece, node)) return;
      flight.ended[node] = messages_.Receive(rank, kSecondPhase, Buffer(piece, buffer++));
    });
  }
  size_t at = 0, next = 0;
  ForOthers([&](int node, int rank) {
    if (!Speaks(piece, node)) return;
    if (next == 0 || !plan_.same()) {
      at = next;
      next = Say(piece, sources, node, at);
    }
    const size_t bytes = plan_.Ends(piece, node, lane_).count * combine_.Said(layout_.here);
    flight.sent.push_back(messages_.Send(rank, kFirstPhase, static_cast<int64_t>(piece),
                                         Buffer(piece, 0), at, bytes));
  });
  messages_.Ring();
  flight.own = plan_.same() ? 0 : next;
  if (!plan_.same()) Say(piece, sources, layout_.here, next);
}

/*! \brief Write what this node says of what a node ends into its buffer; where the next is to be.
 */
size_t Lane::Say(size_t piece, const uint8_t* const* sources, int node, size_t at) {
  const Range range = plan_.Ends(piece, node, lane_);
  const int members = layout_.nodes[layout_.here].size();
  const size_t said = combine_.Said(layout_.here);
  uint8_t* to = messages_.Body(Buffer(piece, 0), at);
  const void* elements[kMaxRanks];
  if (members == 1) {
    plan_.ForRuns(piece, range, [&](size_t element, size_t in_piece, size_t count) {
      elements[0] = sources[0] + element * plan_.width;
      combine_.Say(to + (in_piece - range.first) * said, elements, count);
    });
  } else {
    for (int i = 0; i < members; ++i) elements[i] = sources[i] + range.first * plan_.width;
    combine_.Say(to, elements, range.count);
  }
  return at + kMessageHead + WholeLines(range.count * said);
}

/*! \brief dst = what all nodes, this one too, say of what this one ends. */
void Lane::EndOwn(size_t piece, uint8_t* dst) {
  const Flight& flight = FlightOf(piece);
  const size_t count = plan_.Ends(piece, layout_.here, lane_).count;
  const uint8_t* said[kMaxNodes];
  ForOthers([&](int node, int) {
    said[node] =
        messages_.Take(flight.said[node], static_cast<int64_t>(piece), count * combine_.Said(node));
  });
  said[layout_.here] = messages_.Body(Buffer(piece, 0), flight.own);
  combine_.End(dst, said, count);
}

void Lane::Middle(size_t piece) {
  if (!Speaks(piece, layout_.here)) return;
  const size_t result = Buffer(piece, layout_.nodes.size());
  const size_t bytes = plan_.Ends(piece, layout_.here, lane_).count * plan_.width;
  EndOwn(piece, messages_.Body(result));
  ForOthers([&](int node, int rank) {
    if (!plan_.Told(node)) return;
    FlightOf(piece).sent.push_back(
        messages_.Send(rank, kSecondPhase, static_cast<int64_t>(piece), result, 0, bytes));
  });
  messages_.Ring();
}

void Lane::End(size_t piece, uint8_t* dst) {
  Flight& flight = FlightOf(piece);
  if (!plan_.two_hops()) {
    const size_t first = plan_.Ends(piece, layout_.here, lane_).first;
    if (Speaks(piece, layout_.here)) EndOwn(piece, dst + first * plan_.width);
  } else if (plan_.Told(layout_.here)) {
    auto copy = [&](const Range& range, const uint8_t* from) {
      CopyBytes(dst + range.first * plan_.width, from, range.count * plan_.width, false);
    };
    copy(plan_.Ends(piece, layout_.here, lane_),
         messages_.Body(Buffer(piece, layout_.nodes.size())));
    ForOthers([&](int node, int) {
      if (!Speaks(piece, node)) return;
      const Range range = plan_.Ends(piece, node, lane_);
      copy(range, messages_.Take(flight.ended[node], static_cast<int64_t>(piece),
                                 range.count * plan_.width));
    });
  }
  for (const WireTicket& ticket : flight.sent) messages_.Await(ticket);
  flight.sent.clear();
}

}  // namespace tvm_ipc
