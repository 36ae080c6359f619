/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file point_to_point.cc
 * \brief Messages from a rank to one of another node: packets through the wires of both, some of
 *        them on their way at a time. A sender returns when the last ones are in its wire, so that
 * two ranks may send to each other first, up to two packets.
 */
#include <algorithm>
#include <cstring>

#include "core/messages.h"
#include "core/wire.h"
#include "mpi/collectives.h"
#include "shm/reduce.h"

namespace tvm_ipc::across {

namespace {

constexpr size_t kDepth = 3;
constexpr size_t kHead = kLine;
/*! \brief The last packets of a message, which the sender leaves to the engine. */
constexpr size_t kLeft = 2;

size_t Packets(const Buffer& buffer) {
  return std::max<size_t>(1, (buffer.bytes() + kMessageBytes - 1) / kMessageBytes);
}

size_t BytesOf(const Buffer& buffer, size_t packet) {
  return std::min(kMessageBytes, buffer.bytes() - packet * kMessageBytes);
}

}  // namespace

void Send(Rank& rank, RankWire& wire, const Buffer& send, int receiver) {
  const RemoteLink link = rank.BeginRemote(receiver, true);
  const int node = rank.control().NodeOf(receiver);
  const int32_t tag = WireTag(kWorld, rank.id(), receiver, kPacketPhase);
  Descriptor mine = DescribeMessage(send);
  const size_t packets = Packets(send);
  const size_t depth = std::min(kDepth, packets);
  WireUse use(wire, link.generation, nullptr, mine, depth, depth);
  use.AwaitLeft(receiver, kLeft - 1);
  WireTicket tickets[kDepth];
  for (size_t packet = 0; packet < packets + depth; ++packet) {
    const size_t turn = packet % depth;
    if (packet >= packets && packet - depth + kLeft >= packets) {
      use.Leave(tickets[turn], turn, receiver);
      continue;
    }
    if (packet >= depth) use.Await(tickets[turn]);
    if (packet >= packets) continue;
    mine.offset = static_cast<int64_t>(packet);
    memcpy(use.buffer(turn), &mine, sizeof(mine));
    CopyBytes(use.buffer(turn) + kHead, send.begin() + packet * kMessageBytes,
              BytesOf(send, packet), false);
    tickets[turn] = use.Send(node, tag, turn, 0, kHead + BytesOf(send, packet));
    use.Ring();
  }
}

void Receive(Rank& rank, RankWire& wire, const Buffer& recv, int sender) {
  const RemoteLink link = rank.BeginRemote(sender, false);
  const int node = rank.control().NodeOf(sender);
  const int32_t tag = WireTag(kWorld, sender, rank.id(), kPacketPhase);
  const Descriptor mine = DescribeMessage(recv);
  const size_t packets = Packets(recv);
  const size_t depth = std::min(kDepth, packets);
  WireUse use(wire, link.generation, nullptr, mine, depth, depth);
  WireTicket tickets[kDepth];
  for (size_t packet = 0; packet < packets + depth; ++packet) {
    const size_t turn = packet % depth;
    if (packet >= depth) {
      const size_t came = use.Await(tickets[turn]);
      const size_t before = packet - depth;
      Descriptor theirs;
      memcpy(&theirs, use.buffer(turn), sizeof(theirs));
      if (!theirs.Agrees(mine)) FailMessage(rank, sender, theirs, mine);
      if (theirs.offset != static_cast<int64_t>(before) || came != kHead + BytesOf(recv, before)) {
        Fail(kind::kRuntime, "rank ", sender, " sent ", came, " bytes as packet ", theirs.offset,
             " of ", Describe(mine), ", and packet ", before, " was to come");
      }
      CopyBytes(recv.begin() + before * kMessageBytes, use.buffer(turn) + kHead,
                BytesOf(recv, before), false);
    }
    if (packet < packets) tickets[turn] = use.Receive(node, tag, turn);
    use.Ring();
  }
}

}  // namespace tvm_ipc::across
