/* SPDX-License-Identifier: Apache-2.0 */
/*! \file wire.cc */
#include "core/wire.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.h"
#include "core/group.h"
#include "core/meeting.h"
#include "core/wait.h"
#include "core/wire_block.h"

namespace tvm_ipc {

namespace {

using Clock = std::chrono::steady_clock;

/*! \brief How often a thread that waits for another one of its rank looks whether to go on. */
constexpr std::chrono::milliseconds kLookAtLife{5};

double Seconds(const Rank& rank) {
  return std::chrono::duration<double>(rank.options().deadline).count();
}

[[noreturn]] void FailStopped(const Rank& rank, const Descriptor& mine) {
  Fail(kind::kPeer, Describe(mine), " was stopped: ", DescribeAbort(rank.control()));
}

}  // namespace

void Ring(Control& control) {
  // Both are whole barriers, as in the engine: who sleeps is seen, or sees this.
  control.bell.fetch_add(1, std::memory_order_seq_cst);
  if (control.engine_sleeps.load(std::memory_order_seq_cst) != 0) WakeAll(control.bell);
}

RankWire::RankWire(Rank& rank)
    : rank_(rank), base_(rank.segments()->base(rank.id()) + WireStart(rank.num_ranks())) {
  uses_.resize(kWireRequests);
}

void RankWire::Follow(uint32_t generation, const Descriptor& mine) {
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
           " to be ready after the session recovered; it waits for those of the other nodes");
  }
  // The engine has let go of everything, and nobody else of this rank is in an operation.
  followed_ = true;
  generation_ = generation;
  left_.clear();
  held_.clear();
  free_buffers_.clear();
  for (int i = WireBuffers(control.num_ranks); i-- > 0;) free_buffers_.push_back(i);
  free_requests_.clear();
  for (uint32_t i = kWireRequests; i-- > 0;) {
    free_requests_.push_back(i);
    uses_[i] = table().requests[i].done.load(std::memory_order_relaxed);
  }
}

void RankWire::AwaitFree(std::unique_lock<std::mutex>& lock, const char* what,
                         const Descriptor& mine) {
  const auto end = Clock::now() + rank_.options().deadline;
  const uint32_t before = generation_;
  while (freed_.wait_for(lock, kLookAtLife) == std::cv_status::timeout) {
    const size_t left = left_.size();
    Reclaim();
    if (left_.size() != left) return;
    if (rank_.control().abort.load(std::memory_order_acquire) != 0) FailStopped(rank_, mine);
    if (before != generation_ || Clock::now() < end) continue;
    Fail(kind::kDeadline, Describe(mine), " waited ", Seconds(rank_), " s for ", what,
         " of the wire, which other threads of rank ", rank_.id(), " have");
  }
}

std::vector<int> RankWire::TakeBuffers(size_t least, size_t most, const Descriptor& mine) {
  const size_t all = static_cast<size_t>(WireBuffers(rank_.num_ranks()));
  if (least > all) {
    Fail(kind::kRuntime, Describe(mine), " needs ", least, " buffers of the wire, which has ", all);
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

void RankWire::GiveBuffers(uint32_t generation, const std::vector<int>& buffers) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation != generation_) return;
  // The first ones are taken again first: their memory is there.
  free_buffers_.insert(free_buffers_.end(), buffers.rbegin(), buffers.rend());
  freed_.notify_all();
}

WireTicket RankWire::Post(const WireRequest& request, const Descriptor& mine) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (free_requests_.empty()) AwaitFree(lock, "requests", mine);
  const uint32_t number = free_requests_.back();
  free_requests_.pop_back();
  WireRequest& mine_now = table().requests[number];
  mine_now.sends = request.sends;
  mine_now.peer = request.peer;
  mine_now.tag = request.tag;
  mine_now.generation = generation_;
  mine_now.offset = request.offset;
  mine_now.bytes = request.bytes;
  mine_now.came = 0;
  const uint32_t posted = table().posted.load(std::memory_order_relaxed);
  // There are as many places as requests, so this one is free.
  table().queue[posted % kWireRequests] = static_cast<uint16_t>(number);
  table().posted.store(posted + 1, std::memory_order_release);
  return {number, ++uses_[number]};
}

void RankWire::Release(uint32_t generation, const WireTicket& ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation != generation_) return;
  const bool lacked = free_requests_.empty();
  free_requests_.push_back(ticket.request);
  if (lacked) freed_.notify_all();
}

void RankWire::Leave(uint32_t generation, const WireTicket& ticket, int buffer, int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation == generation_) left_.push_back({ticket, buffer, peer});
}

void RankWire::Hold(uint32_t generation, std::shared_ptr<const void> memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation == generation_) held_.push_back(std::move(memory));
}

void RankWire::RequireRequests(uint32_t generation, size_t count, const Descriptor& mine) {
  Follow(generation, mine);
  std::lock_guard<std::mutex> lock(mutex_);
  Reclaim();
  if (free_requests_.size() >= count) return;
  Fail(kind::kRuntime, Describe(mine), " needs ", count, " messages between nodes, and rank ",
       rank_.id(), " has ", free_requests_.size(), " of ", kWireRequests,
       " left; hide what was shown before, or show less at a time");
}

bool RankWire::OldestLeft(int peer, size_t most, WireTicket* ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  Reclaim();
  const auto is_peer = [peer](const Left& one) { return one.peer == peer; };
  const auto count = std::count_if(left_.begin(), left_.end(), is_peer);
  if (static_cast<size_t>(count) <= most) return false;
  *ticket = std::find_if(left_.begin(), left_.end(), is_peer)->ticket;
  return true;
}

void RankWire::Reclaim() {
  for (auto it = left_.begin(); it != left_.end();) {
    const WireRequest& request = table().requests[it->ticket.request];
    if (!Reached(request.done.load(std::memory_order_acquire), it->ticket.target)) {
      ++it;
      continue;
    }
    free_buffers_.push_back(it->buffer);
    free_requests_.push_back(it->ticket.request);
    it = left_.erase(it);
  }
}

WireUse::WireUse(RankWire& wire, uint32_t generation, const Meeting* where, const Descriptor& mine,
                 size_t least, size_t most)
    : wire_(wire), generation_(generation), where_(where), mine_(mine) {
  wire_.Follow(generation, mine_);
  buffers_ = wire_.TakeBuffers(least, most, mine_);
}

WireUse::~WireUse() {
  if (outstanding_ != 0) return;
  for (int left : left_) buffers_.erase(std::find(buffers_.begin(), buffers_.end(), left));
  wire_.GiveBuffers(generation_, buffers_);
}

size_t WireUse::Start(size_t number) const {
  return kWireTable + static_cast<size_t>(buffers_[number]) * kWireBuffer;
}

int64_t WireUse::offset(size_t number) const {
  return static_cast<int64_t>(WireStart(wire_.rank().num_ranks()) + Start(number));
}

WireTicket WireUse::Post(int node, int32_t tag, bool sends, uint64_t offset, size_t bytes) {
  WireRequest request{};
  request.sends = sends;
  request.peer = node;
  request.tag = tag;
  request.offset = offset;
  request.bytes = bytes;
  const WireTicket ticket = wire_.Post(request, mine_);
  ++outstanding_;
  rung_ = false;
  return ticket;
}

WireTicket WireUse::Send(int node, int32_t tag, size_t buffer, size_t at, size_t bytes) {
  return Post(node, tag, true, static_cast<uint64_t>(offset(buffer)) + at, bytes);
}

WireTicket WireUse::Receive(int node, int32_t tag, size_t buffer) {
  return Post(node, tag, false, static_cast<uint64_t>(offset(buffer)), kWireBuffer);
}

void WireUse::Ring() {
  if (!rung_) tvm_ipc::Ring(wire_.rank().control());
  rung_ = true;
}

bool WireUse::Done(const WireTicket& ticket) const {
  const WireRequest& request = wire_.table().requests[ticket.request];
  return Reached(request.done.load(std::memory_order_acquire), ticket.target);
}

void WireUse::Leave(const WireTicket& ticket, size_t buffer, int peer) {
  Ring();
  wire_.Leave(generation_, ticket, buffers_[buffer], peer);
  left_.push_back(buffers_[buffer]);
  --outstanding_;
}

void WireUse::AwaitLeft(int peer, size_t most) {
  WireTicket ticket;
  while (wire_.OldestLeft(peer, most, &ticket)) WaitDone(ticket);
}

size_t WireUse::Await(const WireTicket& ticket) {
  Ring();
  WaitDone(ticket);
  const size_t came = wire_.table().requests[ticket.request].came;
  wire_.Release(generation_, ticket);
  --outstanding_;
  return came;
}

void WireUse::WaitDone(const WireTicket& ticket) {
  AwaitRequest(wire_.rank(), wire_.table().requests[ticket.request], ticket.target, mine_, where_);
}

}  // namespace tvm_ipc
