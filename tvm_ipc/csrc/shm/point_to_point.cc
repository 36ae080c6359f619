/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file point_to_point.cc
 * \brief Messages from one rank to another.
 *
 * Each ordered pair of ranks has a channel with two packets. The sender numbers its packets m = 1,
 * 2, ...; packet m uses slot m & 1 and may be written once the receiver has taken packet m - 2.
 *
 *   sender   fill the slot's buffer, publish slot.seq = m (release)
 *   receiver see slot.seq reach m (acquire), copy, publish taken = m (release)
 *   sender   see taken reach m - 2 (acquire) before it fills the slot again
 *
 * A message in private memory goes through the packets' buffers piece by piece. The sender returns
 * when the last piece is in a buffer, so two ranks that send to each other first do not block with
 * up to two packets. A larger message in the arena is one packet with its offset, and the sender
 * waits until the receiver has copied it.
 */
#include <algorithm>

#include "core/point_to_point_waits_and_errors.h"
#include "shm/collectives.h"

namespace tvm_ipc {

void Send(Rank& rank, const Buffer& send, int receiver) {
  CheckPeer(rank, "send_to_worker", receiver);
  const Link link = rank.BeginSend(receiver);
  Channel& channel = link.channel;
  uint32_t& packet = link.packet;
  Descriptor mine = DescribeMessage(send);
  auto publish = [&] {
    Slot& slot = channel.slot[packet & 1];
    slot.descriptor = mine;
    Publish(slot.seq, packet, channel.receiver_sleeps);
  };
  const int64_t offset = rank.OffsetOf(send.data, send.bytes());
  if (offset >= 0 && send.bytes() > kPacketBytes) {
    ++packet;
    AwaitMessage(rank, channel.taken, packet - 2, channel.sender_sleeps, mine, "send to", receiver);
    mine.offset = offset;
    publish();
    AwaitMessage(rank, channel.taken, packet, channel.sender_sleeps, mine, "send to", receiver);
    return;
  }
  for (size_t at = 0; at < send.bytes() || at == 0; at += kPacketBytes) {
    ++packet;
    AwaitMessage(rank, channel.taken, packet - 2, channel.sender_sleeps, mine, "send to", receiver);
    CopyBytes(rank.packet_buffer(rank.id(), receiver, packet), send.begin() + at,
              std::min(kPacketBytes, send.bytes() - at), false);
    publish();
  }
}

void Receive(Rank& rank, const Buffer& recv, int sender) {
  CheckPeer(rank, "recv_from_worker", sender);
  const Link link = rank.BeginReceive(sender);
  Channel& channel = link.channel;
  uint32_t& packet = link.packet;
  const Descriptor mine = DescribeMessage(recv);
  for (size_t at = 0; at < recv.bytes() || at == 0; at += kPacketBytes) {
    ++packet;
    Slot& slot = channel.slot[packet & 1];
    AwaitMessage(rank, slot.seq, packet, channel.receiver_sleeps, mine, "receive from", sender);
    const Descriptor theirs = slot.descriptor;
    if (!theirs.Agrees(mine)) FailMessage(rank, sender, theirs, mine);
    const bool whole = theirs.offset >= 0;
    const uint8_t* from = whole ? rank.segments()->base(sender) + theirs.offset
                                : rank.packet_buffer(sender, rank.id(), packet);
    const size_t bytes = whole ? recv.bytes() : std::min(kPacketBytes, recv.bytes() - at);
    CopyBytes(recv.begin() + at, from, bytes, recv.bytes() >= kStreamBytes);
    Publish(channel.taken, packet, channel.sender_sleeps);
    if (whole) return;
  }
}

}  // namespace tvm_ipc
