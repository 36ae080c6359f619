/* SPDX-License-Identifier: Apache-2.0 */
/*! \file internode_arena_block.cc */
#include "core/internode_arena_block.h"

#include <algorithm>
#include <chrono>

#include "core/collective_step_barrier.h"
#include "core/error.h"
#include "core/rank_runtime_state.h"
#include "core/wait.h"

namespace tvm_ipc {

namespace {

/*! \brief The interval at which a rank that waits for another node calls `stalled`. */
constexpr std::chrono::milliseconds kStalled{50};

std::shared_ptr<uint8_t> Allocate(Rank& rank, size_t bytes, const Descriptor& operation) {
  const std::shared_ptr<Heap>& heap = rank.endpoint().heap();
  try {
    return std::shared_ptr<uint8_t>(static_cast<uint8_t*>(heap->Allocate(bytes)),
                                    [heap, bytes](uint8_t* data) { heap->Free(data, bytes); });
  } catch (const Error& error) {
    Fail(error.kind(), Describe(operation), " needs ", bytes,
         " bytes for messages between nodes: ", error.what());
  }
}

}  // namespace

RingRequest& RequestOf(const Rank& rank, int owner, uint32_t request) {
  uint8_t* ring = rank.segments()->base(owner) + RingStart(rank.num_ranks());
  return reinterpret_cast<RingTable*>(ring)->requests[request];
}

void AwaitRequest(const Rank& rank, RingRequest& request, uint32_t target, const Descriptor& mine,
                  const TeamBarrier* where, const std::function<void()>& stalled) {
  const Control& control = rank.control();
  const std::chrono::nanoseconds deadline = rank.options().deadline;
  auto team_text = [&] { return where == nullptr ? "" : where->Where(); };
  auto wait = [&](std::chrono::nanoseconds most) {
    return WaitFor(request.done, target, request.sleepers, control.abort, rank.options().wait, most,
                   Ordered::kByPublisher);
  };
  using Clock = std::chrono::steady_clock;
  std::chrono::nanoseconds left = deadline;
  WaitResult result = WaitResult::kDeadline;
  while (stalled && left.count() > 0) {
    const Clock::time_point begin = Clock::now();
    result = wait(std::min<std::chrono::nanoseconds>(left, kStalled));
    if (result != WaitResult::kDeadline) break;
    left -= std::min<std::chrono::nanoseconds>(Clock::now() - begin, kStandstill);
    stalled();
  }
  if (!stalled) result = wait(deadline);
  switch (result) {
    case WaitResult::kReached:
      break;
    case WaitResult::kAborted:
      Fail(kind::kPeer, Describe(mine), team_text(), " was stopped: ", DescribeAbort(control));
    case WaitResult::kDeadline:
      Fail(kind::kDeadline, Describe(mine), team_text(), " waited ",
           std::chrono::duration<double>(deadline).count(), " s for ",
           DescribeNode(control, request.peer), request.sends ? " to take" : " to send",
           " a message; every rank must make the same collective calls in the same order, or raise"
           " the timeout (TVM_IPC_TIMEOUT)");
  }
}

RingBlock::RingBlock(InternodeRing& ring, uint32_t generation, size_t bytes,
                     const Descriptor& operation)
    : ring_(ring), generation_(generation), operation_(operation) {
  ring_.Follow(generation, operation_);
  memory_ = Allocate(ring_.rank(), bytes, operation_);
  offset_ = ring_.rank().OffsetOf(memory_.get(), bytes);
}

RingBlock::~RingBlock() {
  if (outstanding_ != 0) ring_.Hold(generation_, memory_);
}

RingTicket RingBlock::Post(int node, int32_t tag, bool sends, size_t at, size_t bytes) {
  RingRequest request{};
  request.sends = sends;
  request.peer = node;
  request.tag = tag;
  request.offset = static_cast<uint64_t>(offset_) + at;
  request.bytes = bytes;
  ++outstanding_;
  return ring_.Post(request, operation_);
}

RingTicket RingBlock::Send(int node, int32_t tag, size_t at, size_t bytes) {
  return Post(node, tag, true, at, bytes);
}

RingTicket RingBlock::Receive(int node, int32_t tag, size_t at, size_t room) {
  return Post(node, tag, false, at, room);
}

bool RingBlock::Done(const RingTicket& ticket) const {
  const RingRequest& request = RequestOf(ring_.rank(), ring_.rank().id(), ticket.request);
  return Reached(request.done.load(std::memory_order_acquire), ticket.target);
}

size_t RingBlock::Await(const RingTicket& ticket, const TeamBarrier* where) {
  RingRequest& request = RequestOf(ring_.rank(), ring_.rank().id(), ticket.request);
  AwaitRequest(ring_.rank(), request, ticket.target, operation_, where);
  const size_t received_bytes = request.received;
  ring_.Release(generation_, ticket);
  --outstanding_;
  return received_bytes;
}

}  // namespace tvm_ipc
