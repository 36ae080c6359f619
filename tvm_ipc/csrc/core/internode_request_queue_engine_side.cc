/* SPDX-License-Identifier: Apache-2.0 */
/*! \file internode_request_queue_engine_side.cc */
#include "core/internode_request_queue_engine_side.h"

#include <utility>

#include "core/error.h"
#include "core/wait.h"

namespace tvm_ipc {

EngineRing::EngineRing(std::shared_ptr<Segments> segments)
    : segments_(std::move(segments)), control_(segments_->control()), taken_(control_.num_ranks) {}

RingTable& EngineRing::table(int rank) const {
  return *reinterpret_cast<RingTable*>(segments_->base(rank) + RingStart(control_.num_ranks));
}

size_t EngineRing::Take(RingMessage* messages, size_t most) {
  last_bell_ = control_.bell.load(std::memory_order_seq_cst);  // load it before the queues
  size_t count = 0;
  const uint32_t generation = flushed();
  const uint64_t start = RingStart(control_.num_ranks) + kRingTable;
  const uint64_t end = segments_->segment_bytes();  // ring blocks are in the arena
  for (int i = 0; i < control_.ranks_here; ++i) {
    const int rank = control_.first_here + i;
    const RingTable& here = table(rank);
    const uint32_t posted = here.posted.load(std::memory_order_acquire);
    if (posted - taken_[rank] > kRingRequests) {
      Fail(kind::kRuntime, "rank ", rank, " has posted ", posted - taken_[rank],
           " messages at a time, but has only ", kRingRequests, " requests",
           "; its memory has been overwritten");
    }
    while (count < most && taken_[rank] != posted) {
      const uint32_t number = here.queue[taken_[rank]++ % kRingRequests] % kRingRequests;
      const RingRequest& request = here.requests[number];
      if (request.generation != generation) continue;
      if (request.offset < start || request.offset > end || request.bytes > end - request.offset ||
          request.peer < 0 || request.peer >= control_.num_nodes || request.peer == node() ||
          request.tag < 0 || request.tag > kLargestTag) {
        Fail(kind::kRuntime, "rank ", rank, " has posted an invalid message of ", request.bytes,
             " bytes at ", request.offset, " for node ", request.peer, " with tag ", request.tag,
             "; its memory has been overwritten");
      }
      messages[count++] = {rank,
                           static_cast<int32_t>(number),
                           request.sends,
                           request.peer,
                           request.tag,
                           request.generation,
                           reinterpret_cast<uint64_t>(segments_->base(rank)) + request.offset,
                           request.bytes};
    }
  }
  return count;
}

void EngineRing::Done(int rank, int request, uint64_t received_bytes) {
  RingRequest& done = table(rank).requests[request];
  done.received = received_bytes;
  PublishOrdered(done.done, done.done.load(std::memory_order_relaxed) + 1, done.sleepers);
}

bool EngineRing::Sleep(std::chrono::nanoseconds most) {
  SleepOn(control_.bell, last_bell_, control_.engine_sleeps, most);
  return control_.bell.load(std::memory_order_relaxed) != last_bell_;
}

void EngineRing::Flushed(uint32_t generation) {
  for (int i = 0; i < control_.ranks_here; ++i) {
    const int rank = control_.first_here + i;
    taken_[rank] = table(rank).posted.load(std::memory_order_acquire);
  }
  Publish(control_.flushed, generation, control_.flushed_sleepers);
}

}  // namespace tvm_ipc
