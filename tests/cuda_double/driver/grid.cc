// SPDX-License-Identifier: Apache-2.0
#include "grid.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "errors.h"
#include "settings.h"

namespace cuda_double {
namespace {

constexpr int kTurnsBeforeSleep = 64;

}  // namespace

int BlocksOfMultiprocessor(const CpuKernel& kernel, size_t threads, size_t dynamic_shared) {
  size_t of_threads = 2048 / std::max<size_t>((threads + 31) / 32 * 32, 32);
  size_t bytes = dynamic_shared + kernel.static_shared + 1024;
  return static_cast<int>(std::min<size_t>({of_threads, 233472 / bytes, 32}));
}

GridRunner::GridRunner() : random_(TheSettings().delay_seed + 1) {}

void GridRunner::RunGuarded(const std::function<void()>& body) {
  std::unique_ptr<Fiber> fiber = pool_.Take();
  fiber->Begin(body);
  bool fine = fiber->Resume();
  pool_.Put(std::move(fiber));
  if (!fine) throw Failure{kIllegalAddress, "a copy touched memory that is not there"};
}

std::unique_ptr<Block> GridRunner::TakeBlock() {
  if (idle_.empty()) return std::make_unique<Block>(&pool_);
  std::unique_ptr<Block> block = std::move(idle_.back());
  idle_.pop_back();
  return block;
}

void GridRunner::Run(const Launch& launch) {
  arguments_.clear();
  for (const std::vector<char>& argument : launch.arguments) {
    arguments_.push_back(const_cast<char*>(argument.data()));
  }
  try {
    RunBlocks(launch);
  } catch (const Failure&) {
    for (auto& block : resident_) {
      block->Abandon();
      idle_.push_back(std::move(block));
    }
    resident_.clear();
    throw;
  }
}

void GridRunner::RunBlocks(const Launch& launch) {
  const Settings& settings = TheSettings();
  size_t threads = size_t{launch.block.x} * launch.block.y * launch.block.z;
  size_t room = static_cast<size_t>(settings.multiprocessors) *
                BlocksOfMultiprocessor(*launch.kernel, threads, launch.dynamic_shared);
  uint64_t count = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z, next = 0;
  int idle_turns = 0;
  while (next < count || !resident_.empty()) {
    bool moved = false;
    if (next < count && resident_.size() < std::max<size_t>(room, 1)) {
      CpuDim index{static_cast<uint32_t>(next % launch.grid.x),
                   static_cast<uint32_t>(next / launch.grid.x % launch.grid.y),
                   static_cast<uint32_t>(next / launch.grid.x / launch.grid.y)};
      resident_.push_back(TakeBlock());
      resident_.back()->Begin(launch, arguments_.data(), index,
                              settings.shuffle_threads ? &random_ : nullptr);
      ++next;
      moved = true;
    }
    for (size_t i = 0; i < resident_.size();) {
      Block::Progress progress = resident_[i]->RunOnce();
      while (progress == Block::Progress::kMoved) {
        moved = true;
        progress = resident_[i]->RunOnce();
      }
      if (progress == Block::Progress::kEnded) {
        idle_.push_back(std::move(resident_[i]));
        resident_.erase(resident_.begin() + static_cast<ptrdiff_t>(i));
        moved = true;
      } else {
        ++i;
      }
    }
    if (moved) {
      idle_turns = 0;
    } else if (++idle_turns < kTurnsBeforeSleep) {  // all that is left waits for other memory
      sched_yield();
    } else {
      usleep(50);
    }
  }
}

}  // namespace cuda_double
