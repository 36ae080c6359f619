/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file point_to_point.cc
 * \brief Messages from one rank to another.
 *
 * If the two ends of a message disagree, NCCL waits indefinitely or writes beyond a buffer. So the
 * sender announces the message on the host, and the receiver compares before it calls NCCL. Each
 * ordered pair of ranks on a node has a channel for announcements; a rank of another node gets a
 * short message. The sender does not wait for the receiver, unless it is two messages ahead.
 *
 * On the device, a send completes only when the message is received. If two ranks both send before
 * they receive on the same stream, they wait for each other until the deadline. Use `permute` for
 * such exchanges.
 */
#include <cstring>

#include "core/collective_step_barrier.h"
#include "core/internode_request_queue.h"
#include "core/point_to_point_waits_and_errors.h"
#include "nccl/collectives_endpoint.h"
#include "nccl/team_operation.h"

namespace tvm_ipc::nccl {

namespace {

/*! \brief How many earlier announcements to a rank of another node may still be in flight. */
constexpr size_t kAhead = 1;

/*! \brief Announce a message to a rank of another node. */
void SayThere(Rank& rank, Communicators& communicators, const Descriptor& mine, int receiver) {
  const RemoteLink link = rank.BeginRemote(receiver, true);
  communicators.Check();
  RingLease use(communicators.ring(), link.generation, nullptr, mine, 1, 1);
  use.AwaitDetached(receiver, kAhead);
  memcpy(use.buffer(0), &mine, sizeof(mine));
  const int32_t tag = RingTag(kWorld, rank.id(), receiver, kPacketPhase);
  use.Detach(use.Send(rank.control().NodeOf(receiver), tag, 0, 0, sizeof(mine)), 0, receiver);
}

Descriptor HearThere(Rank& rank, Communicators& communicators, const Descriptor& mine, int sender) {
  const RemoteLink link = rank.BeginRemote(sender, false);
  communicators.Check();
  RingLease use(communicators.ring(), link.generation, nullptr, mine, 1, 1);
  const int32_t tag = RingTag(kWorld, sender, rank.id(), kPacketPhase);
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
    const Link link = rank_.BeginSend(receiver);
    communicators_.Check();
    MessageEnd message(rank_, link, send, receiver);
    message.AwaitSlot();
    message.PublishPacket();
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
  if (rank_.control().IsHere(sender)) {
    const Link link = rank_.BeginReceive(sender);
    communicators_.Check();
    MessageEnd message(rank_, link, recv, sender);
    message.AwaitPacket();
    message.PublishTaken();
  } else {
    const Descriptor theirs = HearThere(rank_, communicators_, mine, sender);
    if (!theirs.Agrees(mine)) FailMessage(rank_, sender, theirs, mine);
  }
  if (recv.bytes() == 0) return;
  communicators_.RunMessage(mine, sender, rank_.id(), [&](Handle handle, cuda::Stream stream) {
    const auto& call = TheLibrary().Recv;
    return Called{call.name(), call(recv.data, recv.bytes(), kUint8, sender, handle, stream)};
  });
}

}  // namespace tvm_ipc::nccl
