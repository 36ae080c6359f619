/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file point_to_point.cc
 * \brief Messages from one rank to another.
 *
 * NCCL would wait for ever, or write beyond a buffer, where the ends of a message disagree. So the
 * sender says on the host what it sends, in the channel that each ordered pair of ranks has, or by
 * a short message to a rank of another node, and the receiver compares before it calls NCCL. The
 * sender goes on at once, up to two messages ahead.
 *
 * On the device a message is sent when it is received: two ranks that both send first, on the
 * stream on which they would receive afterwards, wait for each other, and end in a deadline. What
 * several exchange at once goes by `permute`.
 */
#include <cstring>

#include "core/meeting.h"
#include "core/messages.h"
#include "core/wait.h"
#include "core/wire.h"
#include "nccl/endpoint.h"
#include "nccl/team.h"

namespace tvm_ipc::nccl {

namespace {

/*! \brief What a sender has said to a rank of another node before, and may still be on its way. */
constexpr size_t kAhead = 1;

void SayHere(Rank& rank, Communicators& communicators, const Descriptor& mine, int receiver) {
  const Link link = rank.BeginSend(receiver);
  communicators.Check();
  Channel& channel = link.channel;
  const uint32_t packet = ++link.packet;
  AwaitMessage(rank, channel.taken, packet - 2, channel.sender_sleeps, mine, "send to", receiver);
  Slot& slot = channel.slot[packet & 1];
  slot.descriptor = mine;
  Publish(slot.seq, packet, channel.receiver_sleeps);
}

Descriptor HearHere(Rank& rank, Communicators& communicators, const Descriptor& mine, int sender) {
  const Link link = rank.BeginReceive(sender);
  communicators.Check();
  Channel& channel = link.channel;
  const uint32_t packet = ++link.packet;
  Slot& slot = channel.slot[packet & 1];
  AwaitMessage(rank, slot.seq, packet, channel.receiver_sleeps, mine, "receive from", sender);
  const Descriptor theirs = slot.descriptor;
  if (theirs.Agrees(mine)) Publish(channel.taken, packet, channel.sender_sleeps);
  return theirs;
}

/*! \brief To a rank of another node. */
void SayThere(Rank& rank, Communicators& communicators, const Descriptor& mine, int receiver) {
  const RemoteLink link = rank.BeginRemote(receiver, true);
  communicators.Check();
  WireUse use(communicators.wire(), link.generation, nullptr, mine, 1, 1);
  use.AwaitLeft(receiver, kAhead);
  memcpy(use.buffer(0), &mine, sizeof(mine));
  const int32_t tag = WireTag(kWorld, rank.id(), receiver, kPacketPhase);
  use.Leave(use.Send(rank.control().NodeOf(receiver), tag, 0, 0, sizeof(mine)), 0, receiver);
}

Descriptor HearThere(Rank& rank, Communicators& communicators, const Descriptor& mine, int sender) {
  const RemoteLink link = rank.BeginRemote(sender, false);
  communicators.Check();
  WireUse use(communicators.wire(), link.generation, nullptr, mine, 1, 1);
  const int32_t tag = WireTag(kWorld, sender, rank.id(), kPacketPhase);
  use.Await(use.Receive(rank.control().NodeOf(sender), tag, 0));
  Descriptor theirs;
  memcpy(&theirs, use.buffer(0), sizeof(theirs));
  return theirs;
}

}  // namespace

void NcclEndpoint::Send(const Buffer& send, int receiver) {
  CheckPeer(rank_, "send_to_worker", receiver);
  const Descriptor mine = DescribeMessage(send);
  if (rank_.control().IsHere(receiver)) {
    SayHere(rank_, communicators_, mine, receiver);
  } else {
    SayThere(rank_, communicators_, mine, receiver);
  }
  if (send.bytes() == 0) return;
  communicators_.RunMessage(mine, rank_.id(), receiver, [&](Handle handle, cuda::Stream stream) {
    const auto& call = TheLibrary().Send;
    return Called{call.name(), call(send.data, send.bytes(), kUint8, receiver, handle, stream)};
  });
}

void NcclEndpoint::Receive(const Buffer& recv, int sender) {
  CheckPeer(rank_, "recv_from_worker", sender);
  const Descriptor mine = DescribeMessage(recv);
  const Descriptor theirs = rank_.control().IsHere(sender)
                                ? HearHere(rank_, communicators_, mine, sender)
                                : HearThere(rank_, communicators_, mine, sender);
  if (!theirs.Agrees(mine)) FailMessage(rank_, sender, theirs, mine);
  if (recv.bytes() == 0) return;
  communicators_.RunMessage(mine, sender, rank_.id(), [&](Handle handle, cuda::Stream stream) {
    const auto& call = TheLibrary().Recv;
    return Called{call.name(), call(recv.data, recv.bytes(), kUint8, sender, handle, stream)};
  });
}

}  // namespace tvm_ipc::nccl
