/* SPDX-License-Identifier: Apache-2.0 */
/*! \file exposed_buffers.cc */
#include "core/exposed_buffers.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/collective_step_barrier.h"
#include "core/communication_backend.h"
#include "core/error.h"
#include "core/rank_runtime_state.h"

namespace tvm_ipc {

namespace {

std::string Describe(const ExposedMemory& memory) {
  return Text(memory.count, " x ", Name(memory.type));
}

}  // namespace

ExposureTable& ExposedBuffers::exposure_table(int index) const {
  return barrier_.team_slot(index).exposure_table;
}

uint32_t ExposedBuffers::Expose(const ExposedMemory& memory, std::shared_ptr<const void> keep,
                                const std::function<void(uint32_t)>& start) {
  const uint32_t number = last_ + 1;
  const uint32_t entry = number % kMaxExposed;
  if ((open_ >> entry & 1) != 0) {
    const int open = __builtin_popcountll(open_);
    Fail(kind::kRuntime, "expose", barrier_.Where(), ": tensor ", number,
         " needs the entry of tensor ", numbers_[entry], ", which has not been released; ", open,
         " tensors are exposed, and a rank can expose ", kMaxExposed,
         " at a time to a team, so release some first. A tensor that was dropped without a release"
         " stays exposed");
  }
  if (start) start(number);
  ExposureTable& own = exposure_table(barrier_.index());
  own.memory[entry] = memory;
  numbers_[entry] = number;
  keep_[entry] = std::move(keep);
  open_ |= uint64_t{1} << entry;
  last_ = number;
  Publish(own.last, number, own.sleepers);  // pairs with the acquire in WaitFor
  return number;
}

const ExposedMemory& ExposedBuffers::Of(int index, uint32_t number) const {
  const uint32_t entry = number % kMaxExposed;
  const ExposedMemory& mine = exposure_table(barrier_.index()).memory[entry];
  ExposureTable& other = exposure_table(index);
  const ExposedMemory& theirs = other.memory[entry];
  const RankOptions& options = barrier_.options_;
  switch (WaitFor(other.last, number, other.sleepers, barrier_.control_.abort, barrier_.wait_,
                  options.deadline)) {
    case WaitResult::kReached:
      break;
    case WaitResult::kAborted:
      Fail(kind::kPeer, "peer_view of ", Describe(mine), barrier_.Where(),
           " was stopped: ", DescribeAbort(barrier_.control_));
    case WaitResult::kDeadline: {
      const uint32_t step = barrier_.step();
      const bool ahead = barrier_.team_slot(index).slot[(step + 1) & 1].seq == step + 1;
      Fail(kind::kDeadline, "peer_view of ", Describe(mine), barrier_.Where(), " waited ",
           std::chrono::duration<double>(options.deadline).count(), " s for ",
           barrier_.Name(index, ahead ? step + 1 : step), "; it has exposed ", other.last.load(),
           " tensors, and tensor ", number,
           " was expected; every rank must expose the same tensors in the same order, or raise the"
           " timeout (TVM_IPC_TIMEOUT)");
    }
  }
  if (theirs.count != mine.count || theirs.type != mine.type) {
    Fail(kind::kMismatch, "the ranks disagree", barrier_.Where(), ": tensor ", number,
         " that rank ", barrier_.rank(barrier_.index()), " exposes has ", Describe(mine),
         ", that of rank ", barrier_.rank(index), " has ", Describe(theirs));
  }
  return theirs;
}

void ExposedBuffers::Release(std::vector<uint32_t> numbers,
                             const std::function<void()>& synchronized,
                             std::chrono::nanoseconds deadline) {
  // Open numbers differ by less than the size of the table, even where they wrap.
  const uint32_t first = last_ - kMaxExposed;
  std::sort(numbers.begin(), numbers.end(),
            [&](uint32_t a, uint32_t b) { return a - first < b - first; });
  Descriptor mine;
  mine.op = "release";
  mine.count = numbers.size();
  mine.layout_hash = 14695981039346656037u;  // FNV-1a, number by number
  for (uint32_t number : numbers) mine.layout_hash = (mine.layout_hash ^ number) * 1099511628211u;
  barrier_.Enter(mine, deadline.count() != 0 ? deadline : barrier_.options_.deadline);
  if (synchronized) synchronized();
  for (uint32_t number : numbers) {
    open_ &= ~(uint64_t{1} << number % kMaxExposed);
    keep_[number % kMaxExposed] = nullptr;
  }
}

void ExposedBuffers::Forget() {
  last_ = 0;
  open_ = 0;
  for (auto& kept : keep_) kept = nullptr;
}

void RequireOpen(const char* operation, const Rank& rank, TeamBarrier& barrier,
                 const ExposedBuffer& exposed) {
  if (exposed.session != rank.segments() || exposed.rank != rank.id()) {
    Fail(kind::kValue, operation, ": the tensor was exposed by rank ", exposed.rank,
         exposed.session == rank.segments() ? "" : " of another session", ", and this is rank ",
         rank.id(), "; pass a tensor that this rank has exposed");
  }
  if (exposed.generation != barrier.generation()) {
    Fail(kind::kValue, operation, ": the session has recovered from an error since tensor ",
         exposed.number, barrier.Where(), " was exposed, which has released it; expose it again");
  }
  if (!barrier.exposed_buffers().IsOpen(exposed.number)) {
    Fail(kind::kValue, operation, ": tensor ", exposed.number, barrier.Where(),
         " was released before; read an exposed tensor before its release, and release it once");
  }
}

std::vector<uint32_t> NumbersToRelease(const Rank& rank, TeamBarrier& barrier, TeamId team,
                                       const std::vector<const ExposedBuffer*>& all) {
  std::vector<uint32_t> numbers;
  uint64_t released = 0;
  for (const ExposedBuffer* exposed : all) {
    if (exposed->team != team) {
      Fail(kind::kValue, "release: a tensor was exposed to team ", exposed->team, ", not to team ",
           team, "; release only tensors of one team, and pass that team");
    }
    RequireOpen("release", rank, barrier, *exposed);
    const uint64_t bit = uint64_t{1} << exposed->number % kMaxExposed;
    if ((released & bit) != 0) {
      Fail(kind::kValue, "release: tensor ", exposed->number, barrier.Where(), " is given twice");
    }
    released |= bit;
    numbers.push_back(exposed->number);
  }
  return numbers;
}

int TeamIndexAfter(const TeamBarrier& barrier, int64_t shift) {
  const int64_t size = barrier.size();
  return static_cast<int>(((barrier.index() + shift % size) % size + size) % size);
}

}  // namespace tvm_ipc
