/* SPDX-License-Identifier: Apache-2.0 */
/*! \file internode_request_queue.cc */
#include "core/internode_request_queue.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

#include "core/collective_step_barrier.h"
#include "core/error.h"
#include "core/internode_arena_block.h"
#include "core/rank_runtime_state.h"
#include "core/wait.h"

namespace tvm_ipc {

namespace {

using Clock = std::chrono::steady_clock;

/*! \brief The interval of checks for an abort while a thread waits for another one of its rank. */
constexpr std::chrono::milliseconds kLookAtLife{5};

double Seconds(const Rank& rank) {
  return std::chrono::duration<double>(rank.options().deadline).count();
}

[[noreturn]] void FailStopped(const Rank& rank, const Descriptor& mine) {
  Fail(kind::kPeer, Describe(mine), " was stopped: ", DescribeAbort(rank.control()));
}

}  // namespace

void WakeEngine(Control& control) {
  // Both accesses are full barriers, as in the engine: either the sleeper is seen, or it sees this.
  control.bell.fetch_add(1, std::memory_order_seq_cst);
  if (control.engine_sleeps.load(std::memory_order_seq_cst) != 0) WakeAll(control.bell);
}

InternodeRing::InternodeRing(Rank& rank)
    : rank_(rank), base_(rank.segments()->base(rank.id()) + RingStart(rank.num_ranks())) {
  uses_.resize(kRingRequests);
}

void InternodeRing::Follow(uint32_t generation, const Descriptor& mine) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (followed_ && generation == generation_) return;
  Control& control = rank_.control();
  switch (WaitFor(control.flushed, generation, control.flushed_sleepers, control.abort,
                  rank_.options().wait, rank_.options().deadline)) {
    case WaitResult::kReached:
      break;
    case WaitResult::kAborted:
      FailStopped(rank_, mine);
    case WaitResult::kDeadline:
      Fail(kind::kDeadline, Describe(mine), " waited ", Seconds(rank_), " s for the engine of ",
           DescribeNode(control, control.NodeOf(rank_.id())),
           " to be ready after the session recovered; it waits for the engines of the other nodes");
  }
  // The engine uses nothing any more, and no other thread of this rank is in an operation.
  followed_ = true;
  generation_ = generation;
  detached_.clear();
  held_.clear();
  free_buffers_.clear();
  for (int i = RingBuffers(control.num_ranks); i-- > 0;) free_buffers_.push_back(i);
  free_requests_.clear();
  for (uint32_t i = kRingRequests; i-- > 0;) {
    free_requests_.push_back(i);
    uses_[i] = table().requests[i].done.load(std::memory_order_relaxed);
  }
}

void InternodeRing::AwaitFree(std::unique_lock<std::mutex>& lock, const char* what,
                              const Descriptor& mine) {
  const auto end = Clock::now() + rank_.options().deadline;
  const uint32_t before = generation_;
  while (freed_.wait_for(lock, kLookAtLife) == std::cv_status::timeout) {
    const size_t left = detached_.size();
    Reclaim();
    if (detached_.size() != left) return;
    if (rank_.control().abort.load(std::memory_order_acquire) != 0) FailStopped(rank_, mine);
    if (before != generation_ || Clock::now() < end) continue;
    Fail(kind::kDeadline, Describe(mine), " waited ", Seconds(rank_), " s for ", what,
         " of the internode ring, which other threads of rank ", rank_.id(), " use");
  }
}

std::vector<int> InternodeRing::TakeBuffers(size_t least, size_t most, const Descriptor& mine) {
  const size_t all = static_cast<size_t>(RingBuffers(rank_.num_ranks()));
  if (least > all) {
    Fail(kind::kRuntime, Describe(mine), " needs ", least,
         " buffers of the internode ring, which has ", all);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  Reclaim();
  while (free_buffers_.size() < least) AwaitFree(lock, "buffers", mine);
  std::vector<int> taken;
  while (taken.size() < most && !free_buffers_.empty()) {
    taken.push_back(free_buffers_.back());
    free_buffers_.pop_back();
  }
  return taken;
}

void InternodeRing::GiveBuffers(uint32_t generation, const std::vector<int>& buffers) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation != generation_) return;
  // In reverse, so that the first buffers are reused first: their pages are already allocated.
  free_buffers_.insert(free_buffers_.end(), buffers.rbegin(), buffers.rend());
  freed_.notify_all();
}

RingTicket InternodeRing::Post(const RingRequest& request, const Descriptor& mine) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (free_requests_.empty()) AwaitFree(lock, "requests", mine);
  const uint32_t number = free_requests_.back();
  free_requests_.pop_back();
  RingRequest& slot = table().requests[number];
  slot.sends = request.sends;
  slot.peer = request.peer;
  slot.tag = request.tag;
  slot.generation = generation_;
  slot.offset = request.offset;
  slot.bytes = request.bytes;
  slot.received = 0;
  const uint32_t posted = table().posted.load(std::memory_order_relaxed);
  // The queue is as long as the table of requests, so this entry is free.
  table().queue[posted % kRingRequests] = static_cast<uint16_t>(number);
  table().posted.store(posted + 1, std::memory_order_release);
  return {number, ++uses_[number]};
}

void InternodeRing::Release(uint32_t generation, const RingTicket& ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation != generation_) return;
  const bool lacked = free_requests_.empty();
  free_requests_.push_back(ticket.request);
  if (lacked) freed_.notify_all();
}

void InternodeRing::Detach(uint32_t generation, const RingTicket& ticket, int buffer, int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation == generation_) detached_.push_back({ticket, buffer, peer});
}

void InternodeRing::Hold(uint32_t generation, std::shared_ptr<const void> memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation == generation_) held_.push_back(std::move(memory));
}

void InternodeRing::RequireRequests(uint32_t generation, size_t count, const Descriptor& mine) {
  Follow(generation, mine);
  std::lock_guard<std::mutex> lock(mutex_);
  Reclaim();
  if (free_requests_.size() >= count) return;
  Fail(kind::kRuntime, Describe(mine), " needs ", count, " messages between nodes, and rank ",
       rank_.id(), " has ", free_requests_.size(), " of ", kRingRequests,
       " left; release exposed tensors first, or expose fewer at a time");
}

bool InternodeRing::OldestDetached(int peer, size_t most, RingTicket* ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  Reclaim();
  const auto is_peer = [peer](const Detached& one) { return one.peer == peer; };
  const auto count = std::count_if(detached_.begin(), detached_.end(), is_peer);
  if (static_cast<size_t>(count) <= most) return false;
  *ticket = std::find_if(detached_.begin(), detached_.end(), is_peer)->ticket;
  return true;
}

void InternodeRing::Reclaim() {
  for (auto it = detached_.begin(); it != detached_.end();) {
    const RingRequest& request = table().requests[it->ticket.request];
    if (!Reached(request.done.load(std::memory_order_acquire), it->ticket.target)) {
      ++it;
      continue;
    }
    free_buffers_.push_back(it->buffer);
    free_requests_.push_back(it->ticket.request);
    it = detached_.erase(it);
  }
}

RingLease::RingLease(InternodeRing& ring, uint32_t generation, const TeamBarrier* where,
                     const Descriptor& mine, size_t least, size_t most)
    : ring_(ring), generation_(generation), where_(where), mine_(mine) {
  ring_.Follow(generation, mine_);
  buffers_ = ring_.TakeBuffers(least, most, mine_);
}

RingLease::~RingLease() {
  if (outstanding_ != 0) return;
  for (int left : detached_) buffers_.erase(std::find(buffers_.begin(), buffers_.end(), left));
  ring_.GiveBuffers(generation_, buffers_);
}

size_t RingLease::Start(size_t number) const {
  return kRingTable + static_cast<size_t>(buffers_[number]) * kRingBuffer;
}

int64_t RingLease::offset(size_t number) const {
  return static_cast<int64_t>(RingStart(ring_.rank().num_ranks()) + Start(number));
}

RingTicket RingLease::Post(int node, int32_t tag, bool sends, uint64_t offset, size_t bytes) {
  RingRequest request{};
  request.sends = sends;
  request.peer = node;
  request.tag = tag;
  request.offset = offset;
  request.bytes = bytes;
  const RingTicket ticket = ring_.Post(request, mine_);
  ++outstanding_;
  engine_woken_ = false;
  return ticket;
}

RingTicket RingLease::Send(int node, int32_t tag, size_t buffer, size_t at, size_t bytes) {
  return Post(node, tag, true, static_cast<uint64_t>(offset(buffer)) + at, bytes);
}

RingTicket RingLease::Receive(int node, int32_t tag, size_t buffer) {
  return Post(node, tag, false, static_cast<uint64_t>(offset(buffer)), kRingBuffer);
}

void RingLease::WakeEngine() {
  if (!engine_woken_) tvm_ipc::WakeEngine(ring_.rank().control());
  engine_woken_ = true;
}

bool RingLease::Done(const RingTicket& ticket) const {
  const RingRequest& request = ring_.table().requests[ticket.request];
  return Reached(request.done.load(std::memory_order_acquire), ticket.target);
}

void RingLease::Detach(const RingTicket& ticket, size_t buffer, int peer) {
  WakeEngine();
  ring_.Detach(generation_, ticket, buffers_[buffer], peer);
  detached_.push_back(buffers_[buffer]);
  --outstanding_;
}

void RingLease::AwaitDetached(int peer, size_t most) {
  RingTicket ticket;
  while (ring_.OldestDetached(peer, most, &ticket)) WaitDone(ticket);
}

size_t RingLease::Await(const RingTicket& ticket) {
  WakeEngine();
  WaitDone(ticket);
  const size_t received_bytes = ring_.table().requests[ticket.request].received;
  ring_.Release(generation_, ticket);
  --outstanding_;
  return received_bytes;
}

void RingLease::WaitDone(const RingTicket& ticket) {
  std::function<void()> stalled;
  if (where_ != nullptr) stalled = [this] { where_->CompareStalled(mine_); };
  AwaitRequest(ring_.rank(), ring_.table().requests[ticket.request], ticket.target, mine_, where_,
               stalled);
}

}  // namespace tvm_ipc
