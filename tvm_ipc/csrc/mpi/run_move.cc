/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file run_move.cc
 * \brief Runs the streams of a move in rounds, one piece of each stream per round.
 *
 * The source sends a piece once to each node that wants it, from its internode ring, and exposes it
 * in its staging buffer if members on its own node want it. On another node one member receives it:
 * the only one that wants it, or one that exposes it to those that do. Then the members of a node
 * synchronize and copy the exposed pieces.
 *
 * The first members of all nodes compare their calls by the first message between each two of them,
 * before they wait for anything else. If no stream uses that link, the message consists of the
 * descriptor only. A reduction begins with such messages too (internode_reduce_plan.h), so nodes
 * that call different collectives always notice.
 *
 * Messages of a few rounds are in flight at a time. By the invariant of the staging buffers
 * (core/collective_step_barrier.h) data exposed in a step is read before the step after the next,
 * and no exit step is needed.
 */
#include "mpi/run_move.h"

#include <algorithm>

#include "shm/select_kernels_by_instruction_set.h"

namespace tvm_ipc {

namespace {

/*! \brief The number of rounds whose messages are in flight at a time. */
constexpr size_t kStepsAhead = 3;

int Count(uint64_t members) { return __builtin_popcountll(members); }

/*! \brief Return the position of the set bit with a number, from 0 on. */
int Nth(uint64_t members, int number) {
  for (; number > 0; --number) members &= members - 1;
  return __builtin_ctzll(members);
}

uint64_t BitOf(int place) { return uint64_t{1} << place; }

/*! \brief The work of one member in each round. */
class Mover {
 public:
  Mover(InternodeTeam& internode_team, const std::vector<Stream>& streams);

  void Run(InternodeRing& ring, InternodeTeam& internode_team, const Descriptor& mine,
           const uint8_t* send, uint8_t* recv);

 private:
  /*! \brief A stream that members on the node read, and its offset in the staging buffer. */
  struct Exposing {
    const Stream* stream;
    int exposer;
    size_t slot;
  };
  struct Sending {
    const Stream* stream;
    std::vector<int> ranks;
    std::vector<RingTicket> tickets[kStepsAhead];
  };
  struct Receiving {
    const Stream* stream;
    /*! \brief The offset in the staging buffer, or -1 if it is not exposed. */
    int64_t slot = -1;
    Messages::Incoming incoming[kStepsAhead];
  };

  void Plan(const Stream& stream);
  void PlanHeads();
  size_t BytesOf(const Stream& stream, size_t round) const {
    return round * piece_ < stream.bytes ? std::min(piece_, stream.bytes - round * piece_) : 0;
  }
  /*! \brief Return whether a stream has a message in a round. In the first round all have one, to
   *         compare the calls. */
  bool Moves(const Stream& stream, size_t round) const {
    return round == 0 || round * piece_ < stream.bytes;
  }
  /*! \brief Return the first buffer of messages that consist of a descriptor only. */
  size_t heads() const { return depth_ * (sends_.size() + receives_.size()); }
  void PostHeads(Messages& messages);
  void Post(Messages& messages, size_t round, const uint8_t* send);

  const NodeLayout& layout_;
  std::vector<uint64_t> members_;
  /*! \brief The number of streams that each member exposes, by team index. */
  std::vector<size_t> slots_;
  std::vector<Exposing> exposed_here_;
  std::vector<Exposing> wanted_;
  std::vector<Sending> sends_;
  std::vector<Receiving> receives_;
  /*! \brief For the first member of a node: the other first members without a stream to or from it.
   */
  std::vector<int> heads_to_, heads_from_;
  std::vector<RingTicket> heads_sent_;
  std::vector<Messages::Incoming> heads_coming_;
  const Stream* own_ = nullptr;
  size_t piece_ = 0;
  size_t rounds_ = 1;
  size_t depth_ = 1;
};

Mover::Mover(InternodeTeam& internode_team, const std::vector<Stream>& streams)
    : layout_(internode_team.layout()), slots_(layout_.ranks.size()) {
  for (const NodeLayout::Node& node : layout_.nodes) {
    uint64_t members = 0;
    for (int place : node.members) members |= BitOf(place);
    members_.push_back(members);
  }
  size_t longest = 0;
  for (const Stream& stream : streams) {
    Plan(stream);
    if (stream.to != BitOf(stream.source)) longest = std::max(longest, stream.bytes);
  }
  PlanHeads();
  const size_t slots = std::max<size_t>(1, *std::max_element(slots_.begin(), slots_.end()));
  piece_ = std::min(kStageBytes / slots / kLine * kLine, kMessageBytes);
  rounds_ = std::max<size_t>(1, (longest + piece_ - 1) / piece_);
  depth_ = std::min(kStepsAhead, rounds_);
}

/*! \brief Choose the member that exposes a stream and the member that receives it, on each node.
 *         Slots are counted for all nodes, because pieces have the same length everywhere. */
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
    Exposing exposing{&stream, layout_.index_of[taker], 0};
    if (readers != 0) {
      exposing.slot = slots_[taker]++;
      if (home && taker == me) exposed_here_.push_back(exposing);
      if (readers & BitOf(me)) wanted_.push_back(exposing);
    }
    if (home) continue;
    if (stream.source == me) sending.ranks.push_back(layout_.ranks[taker]);
    if (taker == me) {
      receives_.push_back(
          {&stream, readers == 0 ? int64_t{-1} : static_cast<int64_t>(exposing.slot), {}});
    }
  }
  if (!sending.ranks.empty()) sends_.push_back(std::move(sending));
}

/*! \brief Find the pairs of first members without a stream from one to the other. */
void Mover::PlanHeads() {
  if (layout_.index_of[layout_.me] != 0) return;
  auto is_first = [&](const Receiving& receiving) {
    return layout_.index_of[receiving.stream->source] == 0;
  };
  const auto others = std::stable_partition(receives_.begin(), receives_.end(), is_first);
  for (int node = 0; node < static_cast<int>(layout_.nodes.size()); ++node) {
    if (node == layout_.here) continue;
    const int place = layout_.nodes[node].members[0];
    const int rank = layout_.ranks[place];
    auto comes = [&](const Receiving& receiving) { return receiving.stream->source == place; };
    auto goes = [&](const Sending& sending) {
      return std::find(sending.ranks.begin(), sending.ranks.end(), rank) != sending.ranks.end();
    };
    if (std::none_of(receives_.begin(), others, comes)) heads_from_.push_back(rank);
    if (std::none_of(sends_.begin(), sends_.end(), goes)) heads_to_.push_back(rank);
  }
}

void Mover::PostHeads(Messages& messages) {
  size_t buffer = heads() + 1;
  for (int rank : heads_from_) {
    heads_coming_.push_back(messages.Receive(rank, kFirstPhase, buffer++));
  }
  size_t at = 0;
  for (int rank : heads_to_) {
    heads_sent_.push_back(messages.Send(rank, kFirstPhase, 0, heads(), at, 0));
    at += kMessageHead;
  }
}

/*! \brief Send the messages of a round; each has its own buffer. */
void Mover::Post(Messages& messages, size_t round, const uint8_t* send) {
  const size_t guard = round % depth_;
  size_t buffer = guard * (sends_.size() + receives_.size());
  for (Receiving& receiving : receives_) {
    const size_t mine = buffer++;
    if (!Moves(*receiving.stream, round)) continue;
    receiving.incoming[guard] =
        messages.Receive(layout_.ranks[receiving.stream->source], kFirstPhase, mine);
  }
  for (Sending& sending : sends_) {
    const size_t mine = buffer++;
    if (!Moves(*sending.stream, round)) continue;
    const size_t bytes = BytesOf(*sending.stream, round);
    CopyBytes(messages.Body(mine), send + sending.stream->from + round * piece_, bytes, false);
    for (int rank : sending.ranks) {
      sending.tickets[guard].push_back(
          messages.Send(rank, kFirstPhase, static_cast<int64_t>(round), mine, 0, bytes));
    }
  }
  messages.WakeEngine();
}

void Mover::Run(InternodeRing& ring, InternodeTeam& internode_team, const Descriptor& mine,
                const uint8_t* send, uint8_t* recv) {
  Team& team = internode_team.team();
  Messages messages(ring, internode_team.layout(), internode_team.barrier(), mine,
                    heads() + 1 + heads_from_.size());
  PostHeads(messages);
  for (size_t round = 0; round < depth_; ++round) Post(messages, round, send);
  if (own_ != nullptr && recv + own_->into != send + own_->from) {
    CopyBytes(recv + own_->into, send + own_->from, own_->bytes, false);
  }
  for (const Messages::Incoming& incoming : heads_coming_) messages.Take(incoming, 0, 0);
  for (size_t round = 0; round < rounds_; ++round) {
    const size_t guard = round % depth_;
    const size_t at = round * piece_;
    for (const Exposing& exposing : exposed_here_) {
      CopyBytes(team.NextBuffer() + exposing.slot * piece_, send + exposing.stream->from + at,
                BytesOf(*exposing.stream, round), false);
    }
    for (Receiving& receiving : receives_) {
      const Stream& stream = *receiving.stream;
      if (!Moves(stream, round)) continue;
      const size_t bytes = BytesOf(stream, round);
      const uint8_t* body =
          messages.Take(receiving.incoming[guard], static_cast<int64_t>(round), bytes);
      if (stream.to & BitOf(layout_.me)) CopyBytes(recv + stream.into + at, body, bytes, false);
      if (receiving.slot < 0) continue;
      CopyBytes(team.NextBuffer() + static_cast<size_t>(receiving.slot) * piece_, body, bytes,
                false);
    }
    internode_team.Enter(mine);
    for (const Exposing& wanted : wanted_) {
      CopyBytes(recv + wanted.stream->into + at, team.buffer(wanted.exposer) + wanted.slot * piece_,
                BytesOf(*wanted.stream, round), false);
    }
    for (Sending& sending : sends_) {
      for (const RingTicket& ticket : sending.tickets[guard]) messages.Await(ticket);
      sending.tickets[guard].clear();
    }
    if (round + depth_ < rounds_) Post(messages, round + depth_, send);
  }
  for (const RingTicket& ticket : heads_sent_) messages.Await(ticket);
}

}  // namespace

void RunMove(InternodeRing& ring, InternodeTeam& internode_team, const Descriptor& mine,
             const std::vector<Stream>& streams, const uint8_t* send, uint8_t* recv) {
  Mover(internode_team, streams).Run(ring, internode_team, mine, send, recv);
}

}  // namespace tvm_ipc
