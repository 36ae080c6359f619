/* SPDX-License-Identifier: Apache-2.0 */
/*! \file exposed_buffers_sent_to_nodes.cc */
#include "mpi/exposed_buffers_sent_to_nodes.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/teams.h"
#include "core/wait.h"
#include "mpi/internode_team_local_barrier.h"
#include "shm/select_kernels_by_instruction_set.h"

namespace tvm_ipc {

namespace {

/*!
 * \brief Bytes of a full message, the head included, so that a tensor of a multiple of 256 KB needs
 *        no extra message for its head. Every receive has room for a full message.
 */
constexpr size_t kWhole = kMessageHead + kMessageBytes;

/*! \brief Return the number of messages of a tensor and its head. */
size_t CountOf(size_t bytes) { return (kMessageHead + bytes + kWhole - 1) / kWhole; }

/*! \brief Return the length of message `i`. */
size_t LengthOf(size_t i, size_t bytes) {
  return std::min(kWhole, kMessageHead + bytes - i * kWhole);
}

/*! \brief Return the offset of the received messages. The tickets that readers wait for precede
 *         them. */
size_t HeadOf(size_t bytes) {
  return (CountOf(bytes) * sizeof(RingTicket) + kLine - 1) / kLine * kLine;
}

Descriptor DescribeExposed(const Buffer& tensor) {
  Descriptor mine;
  mine.op = "expose";
  mine.type = tensor.type;
  mine.count = tensor.count;
  return mine;
}

std::string DescribeMember(const Rank& rank, int member) {
  const Control& control = rank.control();
  return Text("rank ", member, " of ", DescribeNode(control, control.NodeOf(member)));
}

/*! \brief Return the exposure table of a member of another node, which its taker on this node
 * writes. */
ExposureTable& ExposureTableOf(const Rank& rank, TeamId team, int index, int member) {
  const int team_slot =
      team < kFirstTeam ? static_cast<int>(team) : FindTeam(rank, team)->slots[index];
  return rank.control().team_slots[team_slot][member].exposure_table;
}

/*! \brief Return the member of a node that receives the buffers of a member of another node. */
int TakerOf(const NodeLayout& layout, int node, int index) {
  return layout.RankOn(node, layout.index_of[index]);
}

/*! \brief Throw unless the head matches the tensor that this rank exposes with the number. */
void CheckHead(const Rank& rank, const TeamBarrier& barrier, const uint8_t* head,
               const Descriptor& mine, uint32_t number, int from) {
  Descriptor theirs;
  memcpy(&theirs, head, sizeof(theirs));
  if (theirs.Agrees(mine) && theirs.offset == static_cast<int64_t>(number)) return;
  const bool exposed = theirs.op == mine.op && theirs.offset == static_cast<int64_t>(number);
  Fail(kind::kMismatch, "the nodes disagree", barrier.Where(), ": tensor ", number, " of ",
       DescribeMember(rank, rank.id()), " is a ", Describe(mine), "; that of ",
       DescribeMember(rank, from),
       exposed ? Text(" is a ", Describe(theirs)) : " has another position in the order of calls",
       "; every rank must expose the same tensors in the same order");
}

}  // namespace

InternodeExposedBuffers::OfTeam& InternodeExposedBuffers::Of(TeamId team, uint32_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  OfTeam& found = teams_[team];
  if (found.generation != generation) {
    found.in_flight.clear();  // messages in flight keep their memory
    found.generation = generation;
  }
  return found;
}

/*! \brief Allocate memory for the copies that this member receives. */
std::vector<InternodeExposedBuffers::Landing> InternodeExposedBuffers::Prepare(
    const NodeLayout& layout, uint32_t generation, const Buffer& tensor, const Descriptor& mine) {
  const size_t bytes = tensor.bytes();
  // Each receive has room for a whole message: a longer buffer of a peer is not truncated by MPI,
  // but detected in the head.
  const size_t room = HeadOf(bytes) + CountOf(bytes) * kWhole;
  std::vector<int> taken;
  for (int index = 0; index < layout.size(); ++index) {
    if (layout.node_of[index] == layout.here) continue;
    if (TakerOf(layout, layout.here, index) == rank_.id()) taken.push_back(index);
  }
  const size_t messages = CountOf(bytes) * (taken.size() + layout.nodes.size() - 1);
  ring_.RequireRequests(generation, messages, mine);
  std::vector<Landing> landings;
  for (int index : taken) {
    landings.push_back({layout.ranks[index],
                        index,
                        std::make_unique<RingBlock>(ring_, generation, room, mine),
                        {}});
  }
  return landings;
}

/*! \brief Post all messages, the first ones of all nodes first. */
void InternodeExposedBuffers::Start(const NodeLayout& layout, NumberInFlight& number_in_flight,
                                    const Buffer& tensor, const Descriptor& mine) {
  const size_t bytes = tensor.bytes();
  const Control& control = rank_.control();
  const int nodes = static_cast<int>(layout.nodes.size());
  for (size_t i = 0; i < CountOf(bytes); ++i) {
    for (Landing& landing : number_in_flight.landings) {
      const int32_t tag = RingTag(layout.team, landing.rank, rank_.id(), kExposePhase);
      landing.tickets.push_back(landing.block->Receive(control.NodeOf(landing.rank), tag,
                                                       HeadOf(bytes) + i * kWhole, kWhole));
    }
    for (int k = 1; k < nodes; ++k) {
      const int node = (layout.here + k) % nodes;
      const int taker = TakerOf(layout, node, layout.me);
      const int32_t tag = RingTag(layout.team, rank_.id(), taker, kExposePhase);
      number_in_flight.sent.push_back(number_in_flight.copy->Send(layout.nodes[node].number, tag,
                                                                  i * kWhole, LengthOf(i, bytes)));
    }
  }
  WakeEngine(rank_.control());
}

/*! \brief Publish on this node where the copy will be. */
void InternodeExposedBuffers::Announce(const NodeLayout& layout, const Landing& landing,
                                       const Buffer& tensor, uint32_t number) {
  memcpy(landing.block->data(), landing.tickets.data(),
         landing.tickets.size() * sizeof(RingTicket));
  ExposureTable& exposure_table = ExposureTableOf(rank_, layout.team, landing.index, landing.rank);
  exposure_table.memory[number % kMaxExposed] = {landing.block->offset(), tensor.count, tensor.type,
                                                 0};
  Publish(exposure_table.last, number, exposure_table.sleepers);
}

ExposedBuffer InternodeExposedBuffers::Expose(const NodeLayout& layout, const Buffer& tensor,
                                              std::shared_ptr<const void> keep) {
  const OpGuard guard = rank_.BeginInternode(layout.team);
  const uint32_t generation = guard.barrier.generation();
  OfTeam& team = Of(layout.team, generation);
  Descriptor mine = DescribeExposed(tensor);
  NumberInFlight number_in_flight;
  number_in_flight.landings = Prepare(layout, generation, tensor, mine);
  number_in_flight.copy =
      std::make_unique<RingBlock>(ring_, generation, kMessageHead + tensor.bytes(), mine);
  uint8_t* copy = number_in_flight.copy->data() + kMessageHead;
  CopyBytes(copy, tensor.data, tensor.bytes(), false);
  ExposedBuffer exposed;
  exposed.team = layout.team;
  exposed.session = rank_.segments();
  exposed.generation = generation;
  exposed.rank = rank_.id();
  exposed.memory = tensor;
  exposed.keep = std::move(keep);
  int64_t offset = rank_.OffsetOf(tensor.data, tensor.bytes());
  if (offset < 0) {
    exposed.memory.data = copy;
    exposed.keep = number_in_flight.copy->memory();
    offset = rank_.OffsetOf(copy, tensor.bytes());
  }
  const auto start = [&](uint32_t number) {
    mine.offset = number;
    memcpy(number_in_flight.copy->data(), &mine, sizeof(mine));
    Start(layout, number_in_flight, tensor, mine);
    for (const Landing& landing : number_in_flight.landings)
      Announce(layout, landing, tensor, number);
    team.in_flight[number] = std::move(number_in_flight);
  };
  exposed.number = guard.barrier.exposed_buffers().Expose(
      {offset, tensor.count, tensor.type, EmulatedLink::Now()}, exposed.keep, start);
  return exposed;
}

/*! \brief Wait for the buffer that a member of another node exposes with the number. */
uint8_t* InternodeExposedBuffers::Arrived(const NodeLayout& layout, const TeamBarrier& barrier,
                                          const ExposedBuffer& exposed, int index) {
  const int from = layout.ranks[index];
  const int taker = TakerOf(layout, layout.here, index);
  Descriptor mine = DescribeExposed(exposed.memory);
  mine.op = "peer_view";
  ExposureTable& exposure_table = ExposureTableOf(rank_, layout.team, index, from);
  const RankOptions& options = rank_.options();
  const Control& control = rank_.control();
  switch (WaitFor(exposure_table.last, exposed.number, exposure_table.sleepers, control.abort,
                  options.wait, options.deadline)) {
    case WaitResult::kReached:
      break;
    case WaitResult::kAborted:
      Fail(kind::kPeer, Describe(mine), barrier.Where(), " was stopped: ", DescribeAbort(control));
    case WaitResult::kDeadline:
      Fail(kind::kDeadline, Describe(mine), barrier.Where(), " waited ",
           std::chrono::duration<double>(options.deadline).count(), " s for rank ", taker,
           ", which takes what ", DescribeMember(rank_, from), " exposes, to expose tensor ",
           exposed.number,
           "; every rank must expose the same tensors in the same order, or raise the timeout"
           " (TVM_IPC_TIMEOUT)");
  }
  const ExposedMemory& theirs = exposure_table.memory[exposed.number % kMaxExposed];
  const size_t bytes = exposed.memory.bytes();
  if (theirs.count != exposed.memory.count || theirs.type != exposed.memory.type) {
    Fail(kind::kMismatch, "the ranks disagree", barrier.Where(), ": tensor ", exposed.number,
         " that rank ", rank_.id(), " exposes has ", exposed.memory.count, " x ",
         Name(exposed.memory.type), ", that of rank ", taker, " has ", theirs.count, " x ",
         Name(theirs.type));
  }
  uint8_t* begin = rank_.segments()->base(taker) + theirs.offset;
  for (size_t i = 0; i < CountOf(bytes); ++i) {
    RingTicket ticket;
    memcpy(&ticket, begin + i * sizeof(ticket), sizeof(ticket));
    AwaitRequest(rank_, RequestOf(rank_, taker, ticket.request), ticket.target, mine, &barrier);
  }
  CheckHead(rank_, barrier, begin + HeadOf(bytes), DescribeExposed(exposed.memory), exposed.number,
            from);
  return begin + HeadOf(bytes) + kMessageHead;
}

PeerMemory InternodeExposedBuffers::PeerView(const NodeLayout& layout, ExposedBuffer& exposed,
                                             int64_t shift) {
  const OpGuard guard = rank_.BeginInternode(layout.team);
  TeamBarrier& barrier = guard.barrier;
  RequireOpen("peer_view", rank_, barrier, exposed);
  const int64_t size = layout.size();
  const int index = static_cast<int>(((layout.me + shift % size) % size + size) % size);
  if (index == layout.me) return {exposed.memory.data, exposed.keep};
  if (layout.node_of[index] != layout.here) {
    return {Arrived(layout, barrier, exposed, index), rank_.segments()};
  }
  const ExposedMemory& theirs =
      barrier.exposed_buffers().Of(layout.index_of[index], exposed.number);
  return {rank_.segments()->base(layout.ranks[index]) + theirs.offset, rank_.segments()};
}

/*! \brief Wait until all its messages are done. */
void InternodeExposedBuffers::Finish(const NodeLayout& layout, const TeamBarrier& barrier,
                                     uint32_t number, NumberInFlight& number_in_flight) {
  for (Landing& landing : number_in_flight.landings) {
    const ExposureTable& exposure_table =
        ExposureTableOf(rank_, layout.team, landing.index, landing.rank);
    const ExposedMemory& memory = exposure_table.memory[number % kMaxExposed];
    const Buffer tensor{nullptr, memory.count, memory.type};
    const size_t bytes = tensor.bytes();
    for (size_t i = 0; i < CountOf(bytes); ++i) {
      const size_t received_bytes = landing.block->Await(landing.tickets[i], &barrier);
      if (i == 0) {
        CheckHead(rank_, barrier, landing.block->data() + HeadOf(bytes), DescribeExposed(tensor),
                  number, landing.rank);
      }
      if (received_bytes == LengthOf(i, bytes)) continue;
      Fail(kind::kRuntime, Describe(DescribeExposed(tensor)), barrier.Where(), ": ",
           DescribeMember(rank_, landing.rank), " sent ", received_bytes, " bytes as message ", i,
           ", and ", LengthOf(i, bytes),
           " were expected; all nodes must have the same version of this library");
    }
  }
  for (const RingTicket& ticket : number_in_flight.sent)
    number_in_flight.copy->Await(ticket, &barrier);
}

void InternodeExposedBuffers::Release(const NodeLayout& layout,
                                      const std::vector<const ExposedBuffer*>& all) {
  const OpGuard guard = rank_.BeginInternode(layout.team);
  TeamBarrier& barrier = guard.barrier;
  std::vector<uint32_t> numbers = NumbersToRelease(rank_, barrier, layout.team, all);
  OfTeam& team = Of(layout.team, barrier.generation());
  for (uint32_t number : numbers) Finish(layout, barrier, number, team.in_flight.at(number));
  // This deadline is longer than that of a wait for another node, whose error names that node.
  barrier.exposed_buffers().Release(numbers, {}, rank_.options().deadline * 5 / 4);
  for (uint32_t number : numbers) team.in_flight.erase(number);
}

}  // namespace tvm_ipc
