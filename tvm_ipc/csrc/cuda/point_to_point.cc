/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file point_to_point.cc
 * \brief Messages from one rank to another, through a channel in the regions of both.
 *
 * The kernels of the two ranks wait for each other, and for no other rank. If ranks are threads of
 * one process, a message is sent in pieces, and a kernel is launched only after the kernel for
 * which it waits:
 *
 * - The sender waits until the receiver has launched piece m - 2, launches piece m, and publishes
 *   that.
 * - The receiver waits until the sender has launched piece m, launches it, and publishes that.
 *
 * A piece has at most one packet in each lane, so piece m fits in the buffers of piece m - 2.
 */
#include <algorithm>

#include "core/point_to_point_waits_and_errors.h"
#include "cuda/cuda_endpoint.h"

namespace tvm_ipc::cuda {

namespace {

constexpr uint64_t kPieceBytes = kernels::kLanes * kernels::kPacketBytes;

}  // namespace

kernels::MessageArgs CudaEndpoint::MessageOf(const Buffer& buffer, int peer) {
  Follow(rank_.control().generation.load(std::memory_order_acquire));
  kernels::ErrorRecord* const record = records_.get() + kTeamSlots;
  CheckRecord(*record, nullptr);
  kernels::MessageArgs args{};
  args.guard = GuardOf(&regions_->channels(rank_.id())->failed, record);
  args.header = HeaderOf(kernels::kSend, buffer.type, buffer.count);
  args.peer = peer;
  args.bytes = buffer.bytes();
  return args;
}

void CudaEndpoint::RunMessage(const Buffer& buffer, int peer, bool sends) {
  const char* const what = sends ? "send_to_worker" : "recv_from_worker";
  CheckPeer(rank_, what, peer);
  const Here here(*device_);
  kernels::MessageArgs args = MessageOf(buffer, peer);
  const Link link = sends ? rank_.BeginSend(peer) : rank_.BeginReceive(peer);
  const int from = sends ? rank_.id() : peer;
  const int to = sends ? peer : rank_.id();
  args.send_queue = &regions_->channels(from)->out[to];
  args.receive_queue = &regions_->channels(to)->in[from];
  const Enqueuing enqueuing(*this, (sends ? sent_ : received_)[static_cast<size_t>(peer)]);
  const bool capturing = enqueuing.capturing();
  if (meets_ && capturing) RequireReplays(what);
  auto launch = [&](uint64_t at, uint64_t bytes) {
    if (sends) {
      args.send = buffer.begin() + at;
    } else {
      args.recv = buffer.begin() + at;
    }
    args.bytes = bytes;
    Launch(what, sends ? kernels_->send : kernels_->receive, kernels::LaunchMessage(bytes, limits_),
           enqueuing.stream(), &args);
  };
  if (!meets_ || capturing) return launch(0, buffer.bytes());
  MessageEnd message(rank_, link, buffer, peer);
  for (uint64_t at = 0; at < buffer.bytes() || at == 0; at += kPieceBytes) {
    if (sends) {
      message.AwaitSlot();
    } else {
      message.AwaitPacket();
    }
    launch(at, std::min(buffer.bytes() - at, kPieceBytes));
    sends ? message.PublishPacket() : message.PublishTaken();
  }
}

void CudaEndpoint::Send(const Buffer& send, int receiver) { RunMessage(send, receiver, true); }
void CudaEndpoint::Receive(const Buffer& recv, int sender) { RunMessage(recv, sender, false); }

}  // namespace tvm_ipc::cuda
