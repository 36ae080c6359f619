/* SPDX-License-Identifier: Apache-2.0 */
/*! \file engine_wire.cc */
#include "core/engine_wire.h"

#include <utility>

#include "core/error.h"
#include "core/wait.h"

namespace tvm_ipc {

EngineWire::EngineWire(std::shared_ptr<Segments> segments)
    : segments_(std::move(segments)), control_(segments_->control()), taken_(control_.num_ranks) {}

WireTable& EngineWire::table(int rank) const {
  return *reinterpret_cast<WireTable*>(segments_->base(rank) + WireStart(control_.num_ranks));
}

size_t EngineWire::Take(WireWork* works, size_t most) {
  heard_ = control_.bell.load(std::memory_order_seq_cst);  // before what is posted is looked at
  size_t count = 0;
  const uint32_t generation = flushed();
  const uint64_t start = WireStart(control_.num_ranks) + kWireTable;
  const uint64_t end = segments_->segment_bytes();  // blocks of the wire lie in the arena
  for (int i = 0; i < control_.ranks_here; ++i) {
    const int rank = control_.first_here + i;
    const WireTable& here = table(rank);
    const uint32_t posted = here.posted.load(std::memory_order_acquire);
    if (posted - taken_[rank] > kWireRequests) {
      Fail(kind::kRuntime, "rank ", rank, " has posted ", posted - taken_[rank],
           " messages at a time, and has ", kWireRequests, " requests",
           "; its memory has been written over");
    }
    while (count < most && taken_[rank] != posted) {
      const uint32_t number = here.queue[taken_[rank]++ % kWireRequests] % kWireRequests;
      const WireRequest& request = here.requests[number];
      if (request.generation != generation) continue;
      if (request.offset < start || request.offset > end || request.bytes > end - request.offset ||
          request.peer < 0 || request.peer >= control_.num_nodes || request.peer == node() ||
          request.tag < 0 || request.tag > kLargestTag) {
        Fail(kind::kRuntime, "rank ", rank, " has posted what is no message: ", request.bytes,
             " bytes at ", request.offset, " for node ", request.peer, " with tag ", request.tag,
             "; its memory has been written over");
      }
      works[count++] = {rank,
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

void EngineWire::Done(int rank, int request, uint64_t came) {
  WireRequest& done = table(rank).requests[request];
  done.came = came;
  PublishOrdered(done.done, done.done.load(std::memory_order_relaxed) + 1, done.sleepers);
}

bool EngineWire::Sleep(std::chrono::nanoseconds most) {
  SleepOn(control_.bell, heard_, control_.engine_sleeps, most);
  return control_.bell.load(std::memory_order_relaxed) != heard_;
}

void EngineWire::Flushed(uint32_t generation) {
  for (int i = 0; i < control_.ranks_here; ++i) {
    const int rank = control_.first_here + i;
    taken_[rank] = table(rank).posted.load(std::memory_order_acquire);
  }
  Publish(control_.flushed, generation, control_.flushed_sleepers);
}

}  // namespace tvm_ipc
