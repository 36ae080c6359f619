// SPDX-License-Identifier: Apache-2.0
#include "grid.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

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
constexpr int kTurnsBeforeSleep = 64;

size_t Rounded(size_t bytes) { return (bytes + 127) / 128 * 128; }

std::string Hex(void* address) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", address);
  return text;
}

}  // namespace

GridRunner::GridRunner() : random_(TheSettings().delay_seed + 1) {
  void* memory = mmap(nullptr, kSharedBytes + 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kSharedBytes, PROT_READ | PROT_WRITE) != 0) {
    std::perror("cuda double: shared memory of a block");
    std::abort();
  }
  shared_ = static_cast<char*>(memory);
}

GridRunner::~GridRunner() { munmap(shared_, kSharedBytes + 4096); }

void GridRunner::Barrier(CpuThread* cpu) {
  Of(cpu).now_->state = State::kAtBarrier;
  Fiber::Yield();
}

void GridRunner::WarpBarrier(CpuThread* cpu, uint32_t lanes) {
  Of(cpu).now_->state = State::kAtWarpBarrier;
  Of(cpu).now_->lanes = lanes;
  Fiber::Yield();
}

void GridRunner::Pause(CpuThread* cpu) {
  Of(cpu).paused_ = true;
  Fiber::Yield();
}

std::unique_ptr<Fiber> GridRunner::TakeFiber() {
  if (idle_.empty()) return std::make_unique<Fiber>();
  std::unique_ptr<Fiber> fiber = std::move(idle_.back());
  idle_.pop_back();
  return fiber;
}

// Fibers that did not end are begun anew when they are taken again; nothing on their stacks is
// owned.
void GridRunner::Abandon() {
  for (Thread& thread : threads_) {
    if (thread.fiber != nullptr) idle_.push_back(std::move(thread.fiber));
  }
}

void GridRunner::RunGuarded(const std::function<void()>& body) {
  std::unique_ptr<Fiber> fiber = TakeFiber();
  fiber->Begin(body);
  bool fine = fiber->Resume();
  idle_.push_back(std::move(fiber));
  if (!fine) throw Failure{kIllegalAddress, "a copy touched " + Hex(Fiber::FaultAddress())};
}

// Memory whose last byte is `from_end` bytes before a page that nobody may touch.
char* GridRunner::Shared(size_t bytes, size_t from_end) {
  char* memory = shared_ + kSharedBytes - from_end - Rounded(bytes);
  int poison = TheSettings().poison;
  std::memset(memory, poison < 0 ? 0 : poison, Rounded(bytes));
  return memory;
}

void GridRunner::Run(const Launch& launch) {
  size_t count = size_t{launch.block.x} * launch.block.y * launch.block.z;
  threads_.resize(count);
  order_.resize(count);
  std::iota(order_.begin(), order_.end(), size_t{0});
  lanes_ = std::vector<uint64_t[2]>((count + kCpuWarp - 1) / kCpuWarp * kCpuWarp);
  arguments_.clear();
  for (const std::vector<char>& argument : launch.arguments) {
    arguments_.push_back(const_cast<char*>(argument.data()));
  }
  CpuDim block{};
  for (block.z = 0; block.z < launch.grid.z; ++block.z) {
    for (block.y = 0; block.y < launch.grid.y; ++block.y) {
      for (block.x = 0; block.x < launch.grid.x; ++block.x) RunBlock(launch, block);
    }
  }
}

void GridRunner::Step(const Launch& launch, Thread& thread) {
  if (thread.state == State::kFresh) {
    thread.fiber = TakeFiber();
    thread.fiber->Begin(
        [&launch, &thread, this] { launch.kernel->run(&thread.cpu, arguments_.data()); });
    thread.state = State::kReady;
  }
  now_ = &thread;
  if (!thread.fiber->Resume()) {
    void* address = Fiber::FaultAddress();
    Abandon();
    throw Failure{kIllegalAddress, "a kernel touched " + Hex(address)};
  }
  if (thread.fiber->ended()) {
    thread.state = State::kDone;
    idle_.push_back(std::move(thread.fiber));
  }
}

bool GridRunner::ReleaseBarrier() {
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

bool GridRunner::ReleaseWarps() {
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

void GridRunner::RunBlock(const Launch& launch, CpuDim block) {
  char* dynamic_shared = Shared(launch.dynamic_shared, 0);
  char* static_shared = Shared(launch.kernel->static_shared, Rounded(launch.dynamic_shared));
  size_t index = 0;
  CpuDim at{};
  for (at.z = 0; at.z < launch.block.z; ++at.z) {
    for (at.y = 0; at.y < launch.block.y; ++at.y) {
      for (at.x = 0; at.x < launch.block.x; ++at.x, ++index) {
        Thread& thread = threads_[index];
        thread.state = State::kFresh;
        thread.cpu = CpuThread{at,
                               block,
                               launch.block,
                               launch.grid,
                               static_shared,
                               dynamic_shared,
                               &lanes_[index / kCpuWarp * kCpuWarp],
                               &GridRunner::Barrier,
                               &GridRunner::WarpBarrier,
                               &GridRunner::Pause,
                               this};
      }
    }
  }
  if (TheSettings().shuffle_threads) std::shuffle(order_.begin(), order_.end(), random_);
  for (int idle_turns = 0;;) {
    bool ran = false, moved = false, left = false;
    for (size_t i : order_) {
      Thread& thread = threads_[i];
      if (thread.state == State::kFresh || thread.state == State::kReady) {
        paused_ = false;
        Step(launch, thread);
        ran = true;
        moved = moved || !paused_;
      }
      left = left || thread.state != State::kDone;
    }
    if (!left) return;
    bool released = ReleaseBarrier();
    released = ReleaseWarps() || released;
    if (!ran && !released) {
      Abandon();
      throw Failure{kLaunchFailed,
                    "threads of a block wait for each other at different barriers, for ever"};
    }
    if (moved || released) {
      idle_turns = 0;
    } else if (++idle_turns < kTurnsBeforeSleep) {  // all that is left waits for other memory
      sched_yield();
    } else {
      usleep(50);
    }
  }
}

}  // namespace cuda_double
