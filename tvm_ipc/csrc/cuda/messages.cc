/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file messages.cc
 * \brief Messages from one rank to another: through a channel in the regions of both.
 *
 * Kernels wait for each other there, and for nobody else. Where ranks are threads of one process, a
 * kernel is launched only when that for which it waits has been launched:
 *
 *   sender    sees that the receiver has launched piece m - 2, launches piece m, tells that
 *   receiver  sees that the sender has launched piece m, launches, tells that
 *
 * A piece has a packet in each lane at most, so it needs no more room than m - 2 had.
 */
#include "core/messages.h"

#include <algorithm>

#include "core/wait.h"
#include "cuda/endpoint.h"

namespace tvm_ipc::cuda {

namespace {

constexpr uint64_t kPieceBytes = kernels::kLanes * kernels::kPacketBytes;

/*! \brief An end of a message, as the other end sees it on the host: both number its pieces. */
class MessageOnHost {
 public:
  MessageOnHost(Rank& rank, const Link& link, const Buffer& buffer, int peer)
      : rank_(rank),
        channel_(link.channel),
        number_(link.packet),
        mine_(DescribeMessage(buffer)),
        peer_(peer) {}

  void BeforeSend() {
    AwaitMessage(rank_, channel_.taken, ++number_ - 2, channel_.sender_sleeps, mine_, "send to",
                 peer_);
  }
  void AfterSend() {
    Slot& slot = channel_.slot[number_ & 1];
    slot.descriptor = mine_;
    Publish(slot.seq, number_, channel_.receiver_sleeps);
  }
  void BeforeReceive() {
    Slot& slot = channel_.slot[++number_ & 1];
    AwaitMessage(rank_, slot.seq, number_, channel_.receiver_sleeps, mine_, "receive from", peer_);
    if (!slot.descriptor.Agrees(mine_)) FailMessage(rank_, peer_, slot.descriptor, mine_);
  }
  void AfterReceive() { Publish(channel_.taken, number_, channel_.sender_sleeps); }

 private:
  Rank& rank_;
  Channel& channel_;
  uint32_t& number_;
  const Descriptor mine_;
  const int peer_;
};

}  // namespace

kernels::MessageArgs CudaEndpoint::MessageOf(const Buffer& buffer, int peer) {
  Follow(rank_.control().generation.load(std::memory_order_acquire));
  kernels::ErrorRecord* const record = records_.get() + kSeats;
  CheckRecord(*record, nullptr);
  kernels::MessageArgs args{};
  args.guard = GuardOf(&regions_->channels(rank_.id())->failed, record);
  args.header = HeaderOf(kernels::kSend, buffer.type, buffer.count, 0);
  args.peer = peer;
  args.bytes = buffer.bytes();
  return args;
}

void CudaEndpoint::Send(const Buffer& send, int receiver) {
  CheckPeer(rank_, "send_to_worker", receiver);
  const Here here(*device_);
  kernels::MessageArgs args = MessageOf(send, receiver);
  const Link link = rank_.BeginSend(receiver);
  args.outbox = &regions_->channels(rank_.id())->out[receiver];
  args.inbox = &regions_->channels(receiver)->in[rank_.id()];
  args.send = send.data;
  bool capturing = false;
  Stream const stream = Enter(sent_[static_cast<size_t>(receiver)], &capturing);
  if (meets_ && capturing) RequireReplays("send_to_worker");
  auto launch = [&] {
    Launch("send_to_worker", kernels_->send, kernels::LaunchMessage(args.bytes, limits_), stream,
           &args);
  };
  if (!meets_ || capturing) return launch();
  MessageOnHost message(rank_, link, send, receiver);
  for (uint64_t at = 0; at < send.bytes() || at == 0; at += kPieceBytes) {
    args.send = send.begin() + at;
    args.bytes = std::min(send.bytes() - at, kPieceBytes);
    message.BeforeSend();
    launch();
    message.AfterSend();
  }
}

void CudaEndpoint::Receive(const Buffer& recv, int sender) {
  CheckPeer(rank_, "recv_from_worker", sender);
  const Here here(*device_);
  kernels::MessageArgs args = MessageOf(recv, sender);
  const Link link = rank_.BeginReceive(sender);
  args.outbox = &regions_->channels(sender)->out[rank_.id()];
  args.inbox = &regions_->channels(rank_.id())->in[sender];
  args.recv = recv.data;
  bool capturing = false;
  Stream const stream = Enter(received_[static_cast<size_t>(sender)], &capturing);
  if (meets_ && capturing) RequireReplays("recv_from_worker");
  auto launch = [&] {
    Launch("recv_from_worker", kernels_->receive, kernels::LaunchMessage(args.bytes, limits_),
           stream, &args);
  };
  if (!meets_ || capturing) return launch();
  MessageOnHost message(rank_, link, recv, sender);
  for (uint64_t at = 0; at < recv.bytes() || at == 0; at += kPieceBytes) {
    args.recv = recv.begin() + at;
    args.bytes = std::min(recv.bytes() - at, kPieceBytes);
    message.BeforeReceive();
    launch();
    message.AfterReceive();
  }
}

}  // namespace tvm_ipc::cuda
