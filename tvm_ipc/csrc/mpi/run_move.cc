/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file run_move.cc
 * \brief A move goes in rounds, a piece of each stream in each. The source sends a piece once to
 *        each node that wants it, out of its wire, and shows it in its staging buffer if others on
 *        its own node want it. On another node one member receives it, which is the one that wants
 *        it, or shows it to those that do. Then the members of a node meet, and copy what is shown.
 *
 * Messages of a few rounds are on their way at a time. Staging buffers are those of shm/team.h:
 * what is shown in a step is read before the next one but one, and no exit step is needed.
 */
#include "mpi/run_move.h"

#include <algorithm>

#include "shm/reduce.h"

namespace tvm_ipc {

namespace {

/*! \brief Rounds whose messages are on their way at a time. */
constexpr size_t kStepsAhead = 3;

int Count(uint64_t places) { return __builtin_popcountll(places); }

/*! \brief The place that is so many of those whose bit is set. */
int Nth(uint64_t places, int number) {
  for (; number > 0; --number) places &= places - 1;
  return __builtin_ctzll(places);
}

uint64_t BitOf(int place) { return uint64_t{1} << place; }

/*! \brief What one member does in each round. */
class Mover {
 public:
  Mover(Across& across, const std::vector<Stream>& streams);

  void Run(RankWire& wire, Across& across, const Descriptor& mine, const uint8_t* send,
           uint8_t* recv);

 private:
  /*! \brief A stream that others on the node read, and where in the staging buffer it is. */
  struct Showing {
    const Stream* stream;
    int shower;
    size_t slot;
  };
  struct Sending {
    const Stream* stream;
    std::vector<int> ranks;
    std::vector<WireTicket> tickets[kStepsAhead];
  };
  struct Receiving {
    const Stream* stream;
    /*! \brief Where it is shown, or -1. */
    int64_t slot = -1;
    Messages::Coming coming[kStepsAhead];
  };

  void Plan(const Stream& stream);
  size_t BytesOf(const Stream& stream, size_t round) const {
    return round * piece_ < stream.bytes ? std::min(piece_, stream.bytes - round * piece_) : 0;
  }
  /*! \brief Whether it has a message in a round: in the first one, for all are to agree. */
  bool Moves(const Stream& stream, size_t round) const {
    return round == 0 || round * piece_ < stream.bytes;
  }
  void Post(Messages& messages, size_t round, const uint8_t* send);

  const Layout& layout_;
  std::vector<uint64_t> members_;
  /*! \brief By place: how many streams the member shows. */
  std::vector<size_t> slots_;
  std::vector<Showing> shown_here_;
  std::vector<Showing> wanted_;
  std::vector<Sending> sends_;
  std::vector<Receiving> receives_;
  const Stream* own_ = nullptr;
  size_t piece_ = 0;
  size_t rounds_ = 1;
  size_t depth_ = 1;
};

Mover::Mover(Across& across, const std::vector<Stream>& streams)
    : layout_(across.layout()), slots_(layout_.ranks.size()) {
  for (const Layout::Node& node : layout_.nodes) {
    uint64_t members = 0;
    for (int place : node.places) members |= BitOf(place);
    members_.push_back(members);
  }
  size_t longest = 0;
  for (const Stream& stream : streams) {
    Plan(stream);
    if (stream.to != BitOf(stream.source)) longest = std::max(longest, stream.bytes);
  }
  const size_t slots = std::max<size_t>(1, *std::max_element(slots_.begin(), slots_.end()));
  piece_ = std::min(kStageBytes / slots / kLine * kLine, kMessageBytes);
  rounds_ = std::max<size_t>(1, (longest + piece_ - 1) / piece_);
  depth_ = std::min(kStepsAhead, rounds_);
}

/*! \brief Who shows and who receives it on each node; slots count on all nodes, for pieces are as
 *         long everywhere. */
void Mover::Plan(const Stream& stream) {
  const int me = layout_.me;
  const uint64_t others = stream.to & ~BitOf(stream.source);
  if (stream.source == me && others != stream.to) own_ = &stream;
  Sending sending{&stream, {}, {}};
  for (size_t node = 0; node < layout_.nodes.size(); ++node) {
    const uint64_t wanting = others & members_[node];
    if (wanting == 0) continue;
    const bool home = layout_.node_of[stream.source] == static_cast<int>(node);
    const int taker =
        home ? stream.source : Nth(wanting, layout_.index_of[stream.source] % Count(wanting));
    const uint64_t readers = wanting & ~BitOf(taker);
    Showing showing{&stream, layout_.index_of[taker], 0};
    if (readers != 0) {
      showing.slot = slots_[taker]++;
      if (home && taker == me) shown_here_.push_back(showing);
      if (readers & BitOf(me)) wanted_.push_back(showing);
    }
    if (home) continue;
    if (stream.source == me) sending.ranks.push_back(layout_.ranks[taker]);
    if (taker == me) {
      receives_.push_back(
          {&stream, readers == 0 ? int64_t{-1} : static_cast<int64_t>(showing.slot), {}});
    }
  }
  if (!sending.ranks.empty()) sends_.push_back(std::move(sending));
}

/*! \brief The messages of a round; each has a buffer. */
void Mover::Post(Messages& messages, size_t round, const uint8_t* send) {
  const size_t turn = round % depth_;
  size_t buffer = turn * (sends_.size() + receives_.size());
  for (Receiving& receiving : receives_) {
    const size_t mine = buffer++;
    if (!Moves(*receiving.stream, round)) continue;
    receiving.coming[turn] =
        messages.Receive(layout_.ranks[receiving.stream->source], kFirstPhase, mine);
  }
  for (Sending& sending : sends_) {
    const size_t mine = buffer++;
    if (!Moves(*sending.stream, round)) continue;
    const size_t bytes = BytesOf(*sending.stream, round);
    CopyBytes(messages.Body(mine), send + sending.stream->from + round * piece_, bytes, false);
    for (int rank : sending.ranks) {
      sending.tickets[turn].push_back(
          messages.Send(rank, kFirstPhase, static_cast<int64_t>(round), mine, 0, bytes));
    }
  }
  messages.Ring();
}

void Mover::Run(RankWire& wire, Across& across, const Descriptor& mine, const uint8_t* send,
                uint8_t* recv) {
  Team& team = across.team();
  Messages messages(wire, across.layout(), across.meeting(), mine,
                    depth_ * (sends_.size() + receives_.size()));
  for (size_t round = 0; round < depth_; ++round) Post(messages, round, send);
  if (own_ != nullptr && recv + own_->into != send + own_->from) {
    CopyBytes(recv + own_->into, send + own_->from, own_->bytes, false);
  }
  for (size_t round = 0; round < rounds_; ++round) {
    const size_t turn = round % depth_;
    const size_t at = round * piece_;
    for (const Showing& showing : shown_here_) {
      CopyBytes(team.NextBuffer() + showing.slot * piece_, send + showing.stream->from + at,
                BytesOf(*showing.stream, round), false);
    }
    for (Receiving& receiving : receives_) {
      const Stream& stream = *receiving.stream;
      if (!Moves(stream, round)) continue;
      const size_t bytes = BytesOf(stream, round);
      const uint8_t* body =
          messages.Take(receiving.coming[turn], static_cast<int64_t>(round), bytes);
      if (stream.to & BitOf(layout_.me)) CopyBytes(recv + stream.into + at, body, bytes, false);
      if (receiving.slot < 0) continue;
      CopyBytes(team.NextBuffer() + static_cast<size_t>(receiving.slot) * piece_, body, bytes,
                false);
    }
    across.Enter(mine);
    for (const Showing& wanted : wanted_) {
      CopyBytes(recv + wanted.stream->into + at, team.buffer(wanted.shower) + wanted.slot * piece_,
                BytesOf(*wanted.stream, round), false);
    }
    for (Sending& sending : sends_) {
      for (const WireTicket& ticket : sending.tickets[turn]) messages.Await(ticket);
      sending.tickets[turn].clear();
    }
    if (round + depth_ < rounds_) Post(messages, round + depth_, send);
  }
}

}  // namespace

void RunMove(RankWire& wire, Across& across, const Descriptor& mine,
             const std::vector<Stream>& streams, const uint8_t* send, uint8_t* recv) {
  Mover(across, streams).Run(wire, across, mine, send, recv);
}

}  // namespace tvm_ipc
