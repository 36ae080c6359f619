/* SPDX-License-Identifier: Apache-2.0 */
/*! \file wire_block.cc */
#include "core/wire_block.h"

#include <chrono>

#include "core/error.h"
#include "core/group.h"
#include "core/meeting.h"
#include "core/wait.h"

namespace tvm_ipc {

namespace {

std::shared_ptr<uint8_t> Allocate(Rank& rank, size_t bytes, const Descriptor& operation) {
  const std::shared_ptr<Heap>& heap = rank.endpoint().heap();
  try {
    return std::shared_ptr<uint8_t>(static_cast<uint8_t*>(heap->Allocate(bytes)),
                                    [heap, bytes](uint8_t* data) { heap->Free(data, bytes); });
  } catch (const Error& error) {
    Fail(error.kind(), Describe(operation), " needs ", bytes,
         " bytes for what is on its way between nodes: ", error.what());
  }
}

}  // namespace

WireRequest& RequestOf(const Rank& rank, int owner, uint32_t request) {
  uint8_t* wire = rank.segments()->base(owner) + WireStart(rank.num_ranks());
  return reinterpret_cast<WireTable*>(wire)->requests[request];
}

void AwaitRequest(const Rank& rank, WireRequest& request, uint32_t target, const Descriptor& mine,
                  const Meeting* where) {
  const Control& control = rank.control();
  const std::chrono::nanoseconds deadline = rank.options().deadline;
  auto said = [&] { return where == nullptr ? "" : where->Where(); };
  switch (WaitFor(request.done, target, request.sleepers, control.abort, rank.options().wait,
                  deadline, Ordered::kByPublisher)) {
    case WaitResult::kReached:
      break;
    case WaitResult::kAborted:
      Fail(kind::kPeer, Describe(mine), said(), " was stopped: ", DescribeAbort(control));
    case WaitResult::kDeadline:
      Fail(kind::kDeadline, Describe(mine), said(), " waited ",
           std::chrono::duration<double>(deadline).count(), " s for ",
           DescribeNode(control, request.peer), request.sends ? " to take" : " to send",
           " a message; every rank must make the same collective calls in the same order, or raise"
           " the timeout (TVM_IPC_TIMEOUT)");
  }
}

WireBlock::WireBlock(RankWire& wire, uint32_t generation, size_t bytes, const Descriptor& operation)
    : wire_(wire), generation_(generation), operation_(operation) {
  wire_.Follow(generation, operation_);
  memory_ = Allocate(wire_.rank(), bytes, operation_);
  offset_ = wire_.rank().OffsetOf(memory_.get(), bytes);
}

WireBlock::~WireBlock() {
  if (outstanding_ != 0) wire_.Hold(generation_, memory_);
}

WireTicket WireBlock::Post(int node, int32_t tag, bool sends, size_t at, size_t bytes) {
  WireRequest request{};
  request.sends = sends;
  request.peer = node;
  request.tag = tag;
  request.offset = static_cast<uint64_t>(offset_) + at;
  request.bytes = bytes;
  ++outstanding_;
  return wire_.Post(request, operation_);
}

WireTicket WireBlock::Send(int node, int32_t tag, size_t at, size_t bytes) {
  return Post(node, tag, true, at, bytes);
}

WireTicket WireBlock::Receive(int node, int32_t tag, size_t at, size_t room) {
  return Post(node, tag, false, at, room);
}

bool WireBlock::Done(const WireTicket& ticket) const {
  const WireRequest& request = RequestOf(wire_.rank(), wire_.rank().id(), ticket.request);
  return Reached(request.done.load(std::memory_order_acquire), ticket.target);
}

size_t WireBlock::Await(const WireTicket& ticket, const Meeting* where) {
  WireRequest& request = RequestOf(wire_.rank(), wire_.rank().id(), ticket.request);
  AwaitRequest(wire_.rank(), request, ticket.target, operation_, where);
  const size_t came = request.came;
  wire_.Release(generation_, ticket);
  --outstanding_;
  return came;
}

}  // namespace tvm_ipc
