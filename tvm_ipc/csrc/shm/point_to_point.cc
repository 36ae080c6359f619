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
#include "shm/endpoint_and_backend.h"

namespace tvm_ipc {

void SharedMemoryEndpoint::Send(const Buffer& send, int receiver) {
  CheckPeer(rank_, "send_to_worker", receiver);
  const Link link = rank_.BeginSend(receiver);
  MessageEnd message(rank_, link, send, receiver);
  const int64_t offset = rank_.OffsetOf(send.data, send.bytes());
  if (offset >= 0 && send.bytes() > kPacketBytes) {
    message.AwaitSlot();
    message.PublishPacket(offset);
    return message.AwaitTaken();
  }
  for (size_t at = 0; at < send.bytes() || at == 0; at += kPacketBytes) {
    message.AwaitSlot();
    CopyBytes(rank_.packet_buffer(rank_.id(), receiver, message.packet()), send.begin() + at,
              std::min(kPacketBytes, send.bytes() - at), false);
    message.PublishPacket();
  }
}

void SharedMemoryEndpoint::Receive(const Buffer& recv, int sender) {
  CheckPeer(rank_, "recv_from_worker", sender);
  const Link link = rank_.BeginReceive(sender);
  MessageEnd message(rank_, link, recv, sender);
  for (size_t at = 0; at < recv.bytes() || at == 0; at += kPacketBytes) {
    const int64_t offset = message.AwaitPacket().offset;
    const bool whole = offset >= 0;
    const uint8_t* from = whole ? rank_.segments()->base(sender) + offset
                                : rank_.packet_buffer(sender, rank_.id(), message.packet());
    const size_t bytes = whole ? recv.bytes() : std::min(kPacketBytes, recv.bytes() - at);
    CopyBytes(recv.begin() + at, from, bytes, recv.bytes() >= kStreamBytes);
    message.PublishTaken();
    if (whole) break;
  }
  if (rank_.link().on()) rank_.link().Travel(recv.bytes());
}

}  // namespace tvm_ipc
