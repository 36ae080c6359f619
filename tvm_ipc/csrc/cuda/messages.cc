/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file messages.cc
 * \brief Messages from one rank to another: through a channel in the regions of both.
 */
#include "core/messages.h"

#include "cuda/endpoint.h"

namespace tvm_ipc::cuda {

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
  Launch("send_to_worker", kernels_->send, kernels::LaunchMessage(args.bytes, limits_), stream,
         &args);
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
  Launch("recv_from_worker", kernels_->receive, kernels::LaunchMessage(args.bytes, limits_), stream,
         &args);
}

}  // namespace tvm_ipc::cuda
