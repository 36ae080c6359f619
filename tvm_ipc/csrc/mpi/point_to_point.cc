/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file point_to_point.cc
 * \brief Messages between ranks of different nodes: packets through the internode rings of both,
 *        several in flight at a time. A sender returns when the last packets are in its ring, so
 * two ranks may send to each other first with up to two packets.
 */
#include <algorithm>
#include <cstring>

#include "core/internode_request_queue.h"
#include "core/point_to_point_waits_and_errors.h"
#include "mpi/internode_collectives.h"
#include "shm/select_kernels_by_instruction_set.h"

namespace tvm_ipc::internode {

namespace {

constexpr size_t kDepth = 3;
constexpr size_t kHead = kLine;
/*! \brief The number of packets at the end of a message that the sender detaches. */
constexpr size_t kLeft = 2;

size_t Packets(const Buffer& buffer) {
  return std::max<size_t>(1, (buffer.bytes() + kMessageBytes - 1) / kMessageBytes);
}

size_t BytesOf(const Buffer& buffer, size_t packet) {
  return std::min(kMessageBytes, buffer.bytes() - packet * kMessageBytes);
}

}  // namespace

void Send(Rank& rank, InternodeRing& ring, const Buffer& send, int receiver) {
  const RemoteLink link = rank.BeginRemote(receiver, true);
  const int node = rank.control().NodeOf(receiver);
  const int32_t tag = RingTag(kWorld, rank.id(), receiver, kPacketPhase);
  Descriptor mine = DescribeMessage(send);
  const size_t packets = Packets(send);
  const size_t depth = std::min(kDepth, packets);
  RingLease use(ring, link.generation, nullptr, mine, depth, depth);
  use.AwaitDetached(receiver, kLeft - 1);
  RingTicket tickets[kDepth];
  for (size_t packet = 0; packet < packets + depth; ++packet) {
    const size_t guard = packet % depth;
    if (packet >= packets && packet - depth + kLeft >= packets) {
      use.Detach(tickets[guard], guard, receiver);
      continue;
    }
    if (packet >= depth) use.Await(tickets[guard]);
    if (packet >= packets) continue;
    mine.offset = static_cast<int64_t>(packet);
    memcpy(use.buffer(guard), &mine, sizeof(mine));
    CopyBytes(use.buffer(guard) + kHead, send.begin() + packet * kMessageBytes,
              BytesOf(send, packet), false);
    tickets[guard] = use.Send(node, tag, guard, 0, kHead + BytesOf(send, packet));
    use.WakeEngine();
  }
}

void Receive(Rank& rank, InternodeRing& ring, const Buffer& recv, int sender) {
  const RemoteLink link = rank.BeginRemote(sender, false);
  const int node = rank.control().NodeOf(sender);
  const int32_t tag = RingTag(kWorld, sender, rank.id(), kPacketPhase);
  const Descriptor mine = DescribeMessage(recv);
  const size_t packets = Packets(recv);
  const size_t depth = std::min(kDepth, packets);
  RingLease use(ring, link.generation, nullptr, mine, depth, depth);
  RingTicket tickets[kDepth];
  for (size_t packet = 0; packet < packets + depth; ++packet) {
    const size_t guard = packet % depth;
    if (packet >= depth) {
      const size_t received_bytes = use.Await(tickets[guard]);
      const size_t before = packet - depth;
      Descriptor theirs;
      memcpy(&theirs, use.buffer(guard), sizeof(theirs));
      if (!theirs.Agrees(mine)) FailMessage(rank, sender, theirs, mine);
      if (theirs.offset != static_cast<int64_t>(before) ||
          received_bytes != kHead + BytesOf(recv, before)) {
        Fail(kind::kRuntime, "rank ", sender, " sent ", received_bytes, " bytes as packet ",
             theirs.offset, " of ", Describe(mine), ", and packet ", before, " was to come");
      }
      CopyBytes(recv.begin() + before * kMessageBytes, use.buffer(guard) + kHead,
                BytesOf(recv, before), false);
    }
    if (packet < packets) tickets[guard] = use.Receive(node, tag, guard);
    use.WakeEngine();
  }
}

}  // namespace tvm_ipc::internode
