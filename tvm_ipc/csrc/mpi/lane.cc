/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file lane.cc
 * \brief One hop: each node says all of the slice to all others, and each ends it by itself. Two
 *        hops: node j gets what the others say of part j, ends that, and sends the others the
 *        result, which is narrow. With N nodes, s bytes said of an element and w bytes of its own a
 *        node sends (N - 1) s or (N - 1) / N (s + w) bytes for each. The bits are the same.
 */
#include "mpi/lane.h"

namespace tvm_ipc {

namespace {

/*! \brief Up to here one lane is enough: more of them are more messages. */
constexpr size_t kOneLaneBytes = 16 << 10;
/*! \brief Up to here the time of a second hop is more than that of the bytes it saves. */
constexpr size_t kOneHopBytes = 64 << 10;
constexpr size_t kDepth = 3;

size_t WholeLines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

ReducePlan::ReducePlan(const Layout& layout, const Combine& combine, size_t count, size_t width)
    : width(width) {
  const size_t bytes = count * width;
  const size_t nodes = layout.nodes.size();
  const size_t most = combine.MostSaid();
  lanes = bytes <= kOneLaneBytes ? 1 : layout.lanes;
  // Half of a staging buffer is for what comes out. Slices are whole lines, and fit a message.
  const size_t line = kLine / width * static_cast<size_t>(lanes);
  piece = std::min(kStageBytes / 2 / width, kMessageBytes / most * static_cast<size_t>(lanes));
  piece = piece / line * line;
  pieces = std::max<size_t>(1, (count + piece - 1) / piece);
  two_hops = bytes > kOneHopBytes && most + width < nodes * most;
  middle = two_hops ? std::min<size_t>(2, pieces) : 0;
  depth = two_hops ? 2 * middle : std::min(kDepth, pieces);
}

Lane::Lane(RankWire& wire, Across& across, const Descriptor& mine, const Combine& combine,
           const ReducePlan& plan, int lane)
    : layout_(across.layout()),
      combine_(combine),
      plan_(plan),
      lane_(lane),
      per_piece_(layout_.nodes.size() * (plan.two_hops ? 2 : 1)),
      messages_(wire, across, mine, plan.depth * per_piece_),
      flights_(plan.depth) {}

void Lane::Start(size_t piece, const void* const* sources, size_t count) {
  Flight& flight = flights_[piece % plan_.depth];
  const size_t n = layout_.nodes.size();
  flight.count = count;
  flight.said.resize(n);
  flight.reduced.resize(n);
  size_t buffer = 1;
  ForOthers([&](int node, int rank) {
    flight.said[node] = messages_.Receive(rank, kFirstPhase, Buffer(piece, buffer++));
  });
  if (plan_.two_hops) {
    ForOthers([&](int node, int rank) {
      flight.reduced[node] = messages_.Receive(rank, kSecondPhase, Buffer(piece, ++buffer));
    });
  }
  const auto number = static_cast<int64_t>(piece);
  const size_t own = Buffer(piece, 0);
  const size_t width = combine_.Said(layout_.here);
  if (!plan_.two_hops) {
    combine_.Say(messages_.Body(own), sources, count);
    ForOthers([&](int, int rank) {
      flight.sent.push_back(messages_.Send(rank, kFirstPhase, number, own, 0, count * width));
    });
  } else {
    const void* part[kMaxRanks];
    size_t at = 0;
    for (int node = 0; node < nodes(); ++node) {
      const size_t start = Part(flight, node);
      const size_t bytes = PartCount(flight, node) * width;
      for (int i = 0; i < layout_.nodes[layout_.here].size(); ++i) {
        part[i] = static_cast<const uint8_t*>(sources[i]) + start * plan_.width;
      }
      combine_.Say(messages_.Body(own, at), part, PartCount(flight, node));
      if (node == layout_.here) {
        flight.own = at;
      } else {
        flight.sent.push_back(
            messages_.Send(layout_.RankOn(node, lane_), kFirstPhase, number, own, at, bytes));
      }
      at += kMessageHead + WholeLines(bytes);
    }
  }
  messages_.Ring();
}

/*! \brief What all nodes say of so many elements, this one too. */
void Lane::TakeSaid(size_t piece, size_t count, const uint8_t** said) {
  const Flight& flight = flights_[piece % plan_.depth];
  ForOthers([&](int node, int) {
    said[node] =
        messages_.Take(flight.said[node], static_cast<int64_t>(piece), count * combine_.Said(node));
  });
  said[layout_.here] = messages_.Body(Buffer(piece, 0), plan_.two_hops ? flight.own : 0);
}

void Lane::Middle(size_t piece) {
  Flight& flight = flights_[piece % plan_.depth];
  const size_t count = PartCount(flight, layout_.here);
  const uint8_t* said[kMaxNodes];
  TakeSaid(piece, count, said);
  const size_t result = Buffer(piece, layout_.nodes.size());
  combine_.End(messages_.Body(result), said, count);
  ForOthers([&](int, int rank) {
    flight.sent.push_back(messages_.Send(rank, kSecondPhase, static_cast<int64_t>(piece), result, 0,
                                         count * plan_.width));
  });
  messages_.Ring();
}

void Lane::End(size_t piece, uint8_t* dst) {
  Flight& flight = flights_[piece % plan_.depth];
  if (plan_.two_hops) {
    auto copy = [&](int node, const uint8_t* from) {
      CopyBytes(dst + Part(flight, node) * plan_.width, from, PartCount(flight, node) * plan_.width,
                false);
    };
    copy(layout_.here, messages_.Body(Buffer(piece, layout_.nodes.size())));
    ForOthers([&](int node, int) {
      copy(node, messages_.Take(flight.reduced[node], static_cast<int64_t>(piece),
                                PartCount(flight, node) * plan_.width));
    });
  } else {
    const uint8_t* said[kMaxNodes];
    TakeSaid(piece, flight.count, said);
    combine_.End(dst, said, flight.count);
  }
  for (const WireTicket& ticket : flight.sent) messages_.Await(ticket);
  flight.sent.clear();
}

}  // namespace tvm_ipc
