// SPDX-License-Identifier: Apache-2.0
#include "block.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "errors.h"
#include "settings.h"

namespace cuda_double {
namespace {

constexpr size_t kSharedBytes = 512
                                << 10;  // more than any device has; a page without access follows

size_t Rounded(size_t bytes) { return (bytes + 127) / 128 * 128; }

std::string Hex(void* address) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", address);
  return text;
}

}  // namespace

std::unique_ptr<Fiber> FiberPool::Take() {
  if (idle_.empty()) return std::make_unique<Fiber>();
  std::unique_ptr<Fiber> fiber = std::move(idle_.back());
  idle_.pop_back();
  return fiber;
}

Block::Block(FiberPool* pool) : pool_(pool) {
  void* memory = mmap(nullptr, kSharedBytes + 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kSharedBytes, PROT_READ | PROT_WRITE) != 0) {
    std::perror("cuda double: shared memory of a block");
    std::abort();
  }
  shared_ = static_cast<char*>(memory);
}

Block::~Block() { munmap(shared_, kSharedBytes + 4096); }

void Block::Barrier(CpuThread* cpu) {
  Of(cpu).now_->state = State::kAtBarrier;
  Fiber::Yield();
}

void Block::WarpBarrier(CpuThread* cpu, uint32_t lanes) {
  Of(cpu).now_->state = State::kAtWarpBarrier;
  Of(cpu).now_->lanes = lanes;
  Fiber::Yield();
}

void Block::Pause(CpuThread* cpu) {
  Of(cpu).paused_ = true;
  Fiber::Yield();
}

void Block::Abandon() {
  for (Thread& thread : threads_) {
    if (thread.fiber != nullptr) pool_->Put(std::move(thread.fiber));
  }
}

// Memory whose last byte is `from_end` bytes before a page that nobody may touch.
char* Block::Shared(size_t bytes, size_t from_end) {
  char* memory = shared_ + kSharedBytes - from_end - Rounded(bytes);
  int poison = TheSettings().poison;
  std::memset(memory, poison < 0 ? 0 : poison, Rounded(bytes));
  return memory;
}

void Block::Begin(const Launch& launch, void* const* arguments, CpuDim index,
                  std::mt19937_64* random) {
  launch_ = &launch;
  arguments_ = arguments;
  size_t count = size_t{launch.block.x} * launch.block.y * launch.block.z;
  threads_.resize(count);
  order_.resize(count);
  std::iota(order_.begin(), order_.end(), size_t{0});
  if (random != nullptr) std::shuffle(order_.begin(), order_.end(), *random);
  lanes_ = std::vector<uint64_t[2]>((count + kCpuWarp - 1) / kCpuWarp * kCpuWarp);
  char* dynamic_shared = Shared(launch.dynamic_shared, 0);
  char* static_shared = Shared(launch.kernel->static_shared, Rounded(launch.dynamic_shared));
  size_t number = 0;
  CpuDim at{};
  for (at.z = 0; at.z < launch.block.z; ++at.z) {
    for (at.y = 0; at.y < launch.block.y; ++at.y) {
      for (at.x = 0; at.x < launch.block.x; ++at.x, ++number) {
        Thread& thread = threads_[number];
        thread.state = State::kFresh;
        thread.cpu = CpuThread{at,
                               index,
                               launch.block,
                               launch.grid,
                               static_shared,
                               dynamic_shared,
                               &lanes_[number / kCpuWarp * kCpuWarp],
                               &Block::Barrier,
                               &Block::WarpBarrier,
                               &Block::Pause,
                               this};
      }
    }
  }
}

void Block::Step(Thread& thread) {
  if (thread.state == State::kFresh) {
    thread.fiber = pool_->Take();
    thread.fiber->Begin([&thread, this] { launch_->kernel->run(&thread.cpu, arguments_); });
    thread.state = State::kReady;
  }
  now_ = &thread;
  if (!thread.fiber->Resume()) {
    throw Failure{kIllegalAddress, "a kernel touched " + Hex(Fiber::FaultAddress())};
  }
  if (thread.fiber->ended()) {
    thread.state = State::kDone;
    pool_->Put(std::move(thread.fiber));
  }
}

bool Block::ReleaseBarrier() {
  bool anyone = false;
  for (Thread& thread : threads_) {
    if (thread.state == State::kDone) continue;
    if (thread.state != State::kAtBarrier) return false;
    anyone = true;
  }
  for (Thread& thread : threads_) {
    if (thread.state == State::kAtBarrier) thread.state = State::kReady;
  }
  return anyone;
}

bool Block::ReleaseWarps() {
  bool released = false;
  for (size_t first = 0; first < threads_.size(); first += kCpuWarp) {
    size_t end = std::min(threads_.size(), first + kCpuWarp);
    for (size_t i = first; i < end; ++i) {
      uint32_t lanes = threads_[i].lanes;
      if (threads_[i].state != State::kAtWarpBarrier) continue;
      bool all = true;  // of its lanes that have not ended wait for the same lanes
      for (size_t j = first; j < end; ++j) {
        if ((lanes >> (j - first) & 1) == 0 || threads_[j].state == State::kDone) continue;
        all = all && threads_[j].state == State::kAtWarpBarrier && threads_[j].lanes == lanes;
      }
      if (!all) continue;
      for (size_t j = first; j < end; ++j) {
        if ((lanes >> (j - first) & 1) != 0 && threads_[j].state == State::kAtWarpBarrier) {
          threads_[j].state = State::kReady;
        }
      }
      released = true;
    }
  }
  return released;
}

Block::Progress Block::RunOnce() {
  bool ran = false, moved = false, left = false;
  for (size_t i : order_) {
    Thread& thread = threads_[i];
    if (thread.state == State::kFresh || thread.state == State::kReady) {
      paused_ = false;
      Step(thread);
      ran = true;
      moved = moved || !paused_;
    }
    left = left || thread.state != State::kDone;
  }
  if (!left) return Progress::kEnded;
  bool released = ReleaseBarrier();
  released = ReleaseWarps() || released;
  if (!ran && !released) {
    throw Failure{kLaunchFailed,
                  "threads of a block wait for each other at different barriers, for ever"};
  }
  return moved || released ? Progress::kMoved : Progress::kWaits;
}

}  // namespace cuda_double
