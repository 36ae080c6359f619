/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file point_to_point.cc
 * \brief Messages from one rank to another.
 *
 * NCCL would wait for ever, or write beyond a buffer, where the ends of a message disagree. So the
 * sender says on the host what it sends, in the channel that each ordered pair of ranks has, and
 * the receiver compares before it calls NCCL. The sender goes on at once, up to two messages ahead.
 *
 * On the device a message is sent when it is received: two ranks that both send first, on the
 * stream on which they would receive afterwards, wait for each other, and end in a deadline. What
 * several exchange at once goes by `permute`.
 */
#include "core/meeting.h"
#include "core/messages.h"
#include "core/wait.h"
#include "nccl/endpoint.h"
#include "nccl/team.h"

namespace tvm_ipc::nccl {

void NcclEndpoint::Send(const Buffer& send, int receiver) {
  CheckPeer(rank_, "send_to_worker", receiver);
  const Link link = rank_.BeginSend(receiver);
  communicators_.Check();
  Channel& channel = link.channel;
  const Descriptor mine = DescribeMessage(send);
  const uint32_t packet = ++link.packet;
  AwaitMessage(rank_, channel.taken, packet - 2, channel.sender_sleeps, mine, "send to", receiver);
  Slot& slot = channel.slot[packet & 1];
  slot.descriptor = mine;
  Publish(slot.seq, packet, channel.receiver_sleeps);
  if (send.bytes() == 0) return;
  communicators_.RunMessage(mine, rank_.id(), receiver, [&](Handle handle, cuda::Stream stream) {
    const auto& call = TheLibrary().Send;
    return Called{call.name(), call(send.data, send.bytes(), kUint8, receiver, handle, stream)};
  });
}

void NcclEndpoint::Receive(const Buffer& recv, int sender) {
  CheckPeer(rank_, "recv_from_worker", sender);
  const Link link = rank_.BeginReceive(sender);
  communicators_.Check();
  Channel& channel = link.channel;
  const Descriptor mine = DescribeMessage(recv);
  const uint32_t packet = ++link.packet;
  Slot& slot = channel.slot[packet & 1];
  AwaitMessage(rank_, slot.seq, packet, channel.receiver_sleeps, mine, "receive from", sender);
  const Descriptor theirs = slot.descriptor;
  if (!theirs.Agrees(mine)) {
    Fail(kind::kMismatch, "the ranks disagree: rank ", sender, " called ", Describe(theirs),
         " to rank ", rank_.id(), ", which wanted to receive ", mine.count, " x ", Name(mine.type));
  }
  Publish(channel.taken, packet, channel.sender_sleeps);
  if (recv.bytes() == 0) return;
  communicators_.RunMessage(mine, sender, rank_.id(), [&](Handle handle, cuda::Stream stream) {
    const auto& call = TheLibrary().Recv;
    return Called{call.name(), call(recv.data, recv.bytes(), kUint8, sender, handle, stream)};
  });
}

}  // namespace tvm_ipc::nccl
