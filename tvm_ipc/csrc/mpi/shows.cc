/* SPDX-License-Identifier: Apache-2.0 */
/*! \file shows.cc */
#include "mpi/shows.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/teams.h"
#include "core/wait.h"
#include "mpi/across.h"
#include "shm/reduce.h"

namespace tvm_ipc {

namespace {

/*!
 * \brief A whole message. A tensor of whole 256 KB has none for the 64 bytes of its head alone, and
 *        any message has room in any receive.
 */
constexpr size_t kWhole = kMessageHead + kMessageBytes;

/*! \brief How many messages a tensor is, with the head before it. */
size_t CountOf(size_t bytes) { return (kMessageHead + bytes + kWhole - 1) / kWhole; }

/*! \brief How long message `i` is. */
size_t LengthOf(size_t i, size_t bytes) {
  return std::min(kWhole, kMessageHead + bytes - i * kWhole);
}

/*! \brief Where they come, behind their tickets, for which readers wait. */
size_t HeadOf(size_t bytes) {
  return (CountOf(bytes) * sizeof(WireTicket) + kLine - 1) / kLine * kLine;
}

Descriptor DescribeShow(const Buffer& tensor) {
  Descriptor mine;
  mine.op = "show";
  mine.type = tensor.type;
  mine.count = tensor.count;
  return mine;
}

std::string Place(const Rank& rank, int member) {
  const Control& control = rank.control();
  return Text("rank ", member, " of ", DescribeNode(control, control.NodeOf(member)));
}

/*! \brief The board of a member of another node, which is the taker's on this one. */
Board& BoardOf(const Rank& rank, TeamId team, int place, int member) {
  const int seat = team < kFirstTeam ? static_cast<int>(team) : FindTeam(rank, team)->places[place];
  return rank.control().seats[seat][member].board;
}

/*! \brief The member of a node that takes what a member of another one shows. */
int TakerOf(const Layout& layout, int node, int place) {
  return layout.RankOn(node, layout.index_of[place]);
}

/*! \brief Throw unless the head is that of the tensor that this rank shows with the number. */
void CheckHead(const Rank& rank, const Meeting& meeting, const uint8_t* head,
               const Descriptor& mine, uint32_t number, int from) {
  Descriptor theirs;
  memcpy(&theirs, head, sizeof(theirs));
  if (theirs.Agrees(mine) && theirs.offset == static_cast<int64_t>(number)) return;
  const bool shown = theirs.op == mine.op && theirs.offset == static_cast<int64_t>(number);
  Fail(kind::kMismatch, "the nodes disagree", meeting.Where(), ": tensor ", number, " of ",
       Place(rank, rank.id()), " is a ", Describe(mine), "; that of ", Place(rank, from),
       shown ? Text(" is a ", Describe(theirs)) : " comes after others than here",
       "; every rank must show the same tensors in the same order");
}

}  // namespace

ShowsAcross::OfTeam& ShowsAcross::Of(TeamId team, uint32_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  OfTeam& found = teams_[team];
  if (found.generation != generation) {
    found.flights.clear();  // what is still on its way keeps its memory
    found.generation = generation;
  }
  return found;
}

/*! \brief Memory for what this member takes. */
std::vector<ShowsAcross::Landing> ShowsAcross::Prepare(const Layout& layout, uint32_t generation,
                                                       const Buffer& tensor,
                                                       const Descriptor& mine) {
  const size_t bytes = tensor.bytes();
  // Each message has room for a whole one: of a rank that shows more, it is not cut off by MPI, but
  // seen in the head.
  const size_t room = HeadOf(bytes) + CountOf(bytes) * kWhole;
  std::vector<int> taken;
  for (int place = 0; place < layout.size(); ++place) {
    if (layout.node_of[place] == layout.here) continue;
    if (TakerOf(layout, layout.here, place) == rank_.id()) taken.push_back(place);
  }
  const size_t messages = CountOf(bytes) * (taken.size() + layout.nodes.size() - 1);
  wire_.RequireRequests(generation, messages, mine);
  std::vector<Landing> landings;
  for (int place : taken) {
    landings.push_back({layout.ranks[place],
                        place,
                        std::make_unique<WireBlock>(wire_, generation, room, mine),
                        {}});
  }
  return landings;
}

/*! \brief Post all of it, the first messages of all first. */
void ShowsAcross::Start(const Layout& layout, Flight& flight, const Buffer& tensor,
                        const Descriptor& mine) {
  const size_t bytes = tensor.bytes();
  const Control& control = rank_.control();
  const int nodes = static_cast<int>(layout.nodes.size());
  for (size_t i = 0; i < CountOf(bytes); ++i) {
    for (Landing& landing : flight.landings) {
      const int32_t tag = WireTag(layout.team, landing.rank, rank_.id(), kShowPhase);
      landing.tickets.push_back(landing.block->Receive(control.NodeOf(landing.rank), tag,
                                                       HeadOf(bytes) + i * kWhole, kWhole));
    }
    for (int k = 1; k < nodes; ++k) {
      const int node = (layout.here + k) % nodes;
      const int taker = TakerOf(layout, node, layout.me);
      const int32_t tag = WireTag(layout.team, rank_.id(), taker, kShowPhase);
      flight.sent.push_back(
          flight.copy->Send(layout.nodes[node].number, tag, i * kWhole, LengthOf(i, bytes)));
    }
  }
  Ring(rank_.control());
}

/*! \brief Say on this node where it comes. */
void ShowsAcross::Announce(const Layout& layout, const Landing& landing, const Buffer& tensor,
                           uint32_t number) {
  memcpy(landing.block->data(), landing.tickets.data(),
         landing.tickets.size() * sizeof(WireTicket));
  Board& board = BoardOf(rank_, layout.team, landing.place, landing.rank);
  board.memory[number % kMaxShown] = {landing.block->offset(), tensor.count, tensor.type, 0};
  Publish(board.last, number, board.sleepers);
}

Shown ShowsAcross::Show(const Layout& layout, const Buffer& tensor,
                        std::shared_ptr<const void> keep) {
  const Turn turn = rank_.BeginAcross(layout.team);
  const uint32_t generation = turn.meeting.generation();
  OfTeam& team = Of(layout.team, generation);
  Descriptor mine = DescribeShow(tensor);
  Flight flight;
  flight.landings = Prepare(layout, generation, tensor, mine);
  flight.copy = std::make_unique<WireBlock>(wire_, generation, kMessageHead + tensor.bytes(), mine);
  uint8_t* copy = flight.copy->data() + kMessageHead;
  CopyBytes(copy, tensor.data, tensor.bytes(), false);
  Shown shown;
  shown.team = layout.team;
  shown.session = rank_.segments();
  shown.generation = generation;
  shown.rank = rank_.id();
  shown.memory = tensor;
  shown.keep = std::move(keep);
  int64_t offset = rank_.OffsetOf(tensor.data, tensor.bytes());
  if (offset < 0) {
    shown.memory.data = copy;
    shown.keep = flight.copy->memory();
    offset = rank_.OffsetOf(copy, tensor.bytes());
  }
  const auto start = [&](uint32_t number) {
    mine.offset = number;
    memcpy(flight.copy->data(), &mine, sizeof(mine));
    Start(layout, flight, tensor, mine);
    for (const Landing& landing : flight.landings) Announce(layout, landing, tensor, number);
    team.flights[number] = std::move(flight);
  };
  shown.number = turn.meeting.shows().Show({offset, tensor.count, tensor.type, EmulatedLink::Now()},
                                           shown.keep, start);
  return shown;
}

/*! \brief Wait for what a member of another node shows with the number. */
uint8_t* ShowsAcross::Arrived(const Layout& layout, const Meeting& meeting, const Shown& shown,
                              int place) {
  const int from = layout.ranks[place];
  const int taker = TakerOf(layout, layout.here, place);
  Descriptor mine = DescribeShow(shown.memory);
  mine.op = "peer";
  Board& board = BoardOf(rank_, layout.team, place, from);
  const RankOptions& options = rank_.options();
  const Control& control = rank_.control();
  switch (WaitFor(board.last, shown.number, board.sleepers, control.abort, options.wait,
                  options.deadline)) {
    case WaitResult::kReached:
      break;
    case WaitResult::kAborted:
      Fail(kind::kPeer, Describe(mine), meeting.Where(), " was stopped: ", DescribeAbort(control));
    case WaitResult::kDeadline:
      Fail(kind::kDeadline, Describe(mine), meeting.Where(), " waited ",
           std::chrono::duration<double>(options.deadline).count(), " s for rank ", taker,
           ", which takes what ", Place(rank_, from), " shows, to show tensor ", shown.number,
           "; every rank must show the same tensors in the same order, or raise the timeout"
           " (TVM_IPC_TIMEOUT)");
  }
  const ShownMemory& theirs = board.memory[shown.number % kMaxShown];
  const size_t bytes = shown.memory.bytes();
  if (theirs.count != shown.memory.count || theirs.type != shown.memory.type) {
    Fail(kind::kMismatch, "the ranks disagree", meeting.Where(), ": tensor ", shown.number,
         " that rank ", rank_.id(), " shows has ", shown.memory.count, " x ",
         Name(shown.memory.type), ", that of rank ", taker, " has ", theirs.count, " x ",
         Name(theirs.type));
  }
  uint8_t* begin = rank_.segments()->base(taker) + theirs.offset;
  for (size_t i = 0; i < CountOf(bytes); ++i) {
    WireTicket ticket;
    memcpy(&ticket, begin + i * sizeof(ticket), sizeof(ticket));
    AwaitRequest(rank_, RequestOf(rank_, taker, ticket.request), ticket.target, mine, &meeting);
  }
  CheckHead(rank_, meeting, begin + HeadOf(bytes), DescribeShow(shown.memory), shown.number, from);
  return begin + HeadOf(bytes) + kMessageHead;
}

PeerMemory ShowsAcross::Peer(const Layout& layout, Shown& shown, int64_t shift) {
  const Turn turn = rank_.BeginAcross(layout.team);
  Meeting& meeting = turn.meeting;
  RequireOpen("peer", rank_, meeting, shown);
  const int64_t size = layout.size();
  const int place = static_cast<int>(((layout.me + shift % size) % size + size) % size);
  if (place == layout.me) return {shown.memory.data, shown.keep};
  if (layout.node_of[place] != layout.here) {
    return {Arrived(layout, meeting, shown, place), rank_.segments()};
  }
  const ShownMemory& theirs = meeting.shows().Of(layout.index_of[place], shown.number);
  return {rank_.segments()->base(layout.ranks[place]) + theirs.offset, rank_.segments()};
}

/*! \brief Nothing of it is on its way any more. */
void ShowsAcross::Finish(const Layout& layout, const Meeting& meeting, uint32_t number,
                         Flight& flight) {
  for (Landing& landing : flight.landings) {
    const Board& board = BoardOf(rank_, layout.team, landing.place, landing.rank);
    const ShownMemory& memory = board.memory[number % kMaxShown];
    const Buffer tensor{nullptr, memory.count, memory.type};
    const size_t bytes = tensor.bytes();
    for (size_t i = 0; i < CountOf(bytes); ++i) {
      const size_t came = landing.block->Await(landing.tickets[i], &meeting);
      if (i == 0) {
        CheckHead(rank_, meeting, landing.block->data() + HeadOf(bytes), DescribeShow(tensor),
                  number, landing.rank);
      }
      if (came == LengthOf(i, bytes)) continue;
      Fail(kind::kRuntime, Describe(DescribeShow(tensor)), meeting.Where(), ": ",
           Place(rank_, landing.rank), " sent ", came, " bytes as message ", i, ", and ",
           LengthOf(i, bytes), " were to come; nodes must have one version of this library");
    }
  }
  for (const WireTicket& ticket : flight.sent) flight.copy->Await(ticket, &meeting);
}

void ShowsAcross::Hide(const Layout& layout, const std::vector<const Shown*>& all) {
  const Turn turn = rank_.BeginAcross(layout.team);
  Meeting& meeting = turn.meeting;
  std::vector<uint32_t> numbers = NumbersToHide(rank_, meeting, layout.team, all);
  OfTeam& team = Of(layout.team, meeting.generation());
  for (uint32_t number : numbers) Finish(layout, meeting, number, team.flights.at(number));
  // Those on this node wait longer than one of them for another node, so that the error names it.
  meeting.shows().Hide(numbers, {}, rank_.options().deadline * 5 / 4);
  for (uint32_t number : numbers) team.flights.erase(number);
}

}  // namespace tvm_ipc
