/* SPDX-License-Identifier: Apache-2.0 */
/*! \file arena_allocator.cc */
#include "core/arena_allocator.h"

#include <algorithm>
#include <iterator>

#include "core/error.h"

namespace tvm_ipc {

Arena::Arena(size_t limit, Commit commit, Release release)
    : commit_(std::move(commit)), release_(std::move(release)) {
  stats_.limit = limit / kAlignment * kAlignment;
}

size_t Arena::Allocate(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > stats_.limit) {
    Fail(kind::kMemory, kIpcMemory, ": ", bytes, " bytes wanted, but the limit of this worker is ",
         stats_.limit, "; raise arena_limit (TVM_IPC_ARENA_LIMIT)");
  }
  bytes = std::max(RoundUp(bytes, kAlignment), kAlignment);
  auto fit = free_by_size_.lower_bound({bytes, 0});
  if (fit == free_by_size_.end()) {
    Grow(bytes);
    fit = free_by_size_.lower_bound({bytes, 0});
  }
  const auto [size, offset] = *fit;
  RemoveFree(free_by_offset_.find(offset));
  if (size > bytes) AddFree(offset + bytes, size - bytes);
  stats_.in_use += bytes;
  stats_.peak_in_use = std::max(stats_.peak_in_use, stats_.in_use);
  ++stats_.allocations;
  return offset;
}

void Arena::Free(size_t offset, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  bytes = std::max(RoundUp(bytes, kAlignment), kAlignment);
  stats_.in_use -= bytes;
  AddFree(offset, bytes);
}

void Arena::Grow(size_t bytes) {
  size_t tail = 0;  // a free block at the very end grows with the arena
  if (!free_by_offset_.empty()) {
    auto last = std::prev(free_by_offset_.end());
    if (last->first + last->second == stats_.committed) tail = last->second;
  }
  const size_t needed = bytes - tail;
  const size_t room = stats_.limit - stats_.committed;
  // Growing by at least a quarter keeps the number of growths logarithmic.
  const size_t wanted = RoundUp(std::max(needed, stats_.committed / 4), kGrowBytes);
  size_t step = std::min(wanted, room);
  const bool fits = needed <= room;
  bool grown = fits && commit_(stats_.committed, step);
  if (fits && !grown && step > needed) {
    step = needed;
    grown = commit_(stats_.committed, step);
  }
  if (!grown) {
    Fail(kind::kMemory, kIpcMemory, ": out of memory: ", bytes, " bytes wanted, ", stats_.in_use,
         " of ", stats_.limit, " in use, largest free block ",
         free_by_size_.empty() ? size_t{0} : free_by_size_.rbegin()->first,
         fits ? "; the system has no more pages" : "; raise arena_limit (TVM_IPC_ARENA_LIMIT)");
  }
  const size_t start = stats_.committed;
  stats_.committed += step;
  ++stats_.growths;
  AddFree(start, step);
}

void Arena::AddFree(size_t offset, size_t bytes) {
  auto next = free_by_offset_.lower_bound(offset);
  if (next != free_by_offset_.end() && offset + bytes == next->first) {
    bytes += next->second;
    auto joined = next++;
    RemoveFree(joined);
  }
  if (next != free_by_offset_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      RemoveFree(previous);
    }
  }
  free_by_offset_.emplace(offset, bytes);
  free_by_size_.emplace(bytes, offset);
}

void Arena::RemoveFree(std::map<size_t, size_t>::iterator block) {
  free_by_size_.erase({block->second, block->first});
  free_by_offset_.erase(block);
}

void Arena::Trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_by_offset_.empty()) return;
  auto last = std::prev(free_by_offset_.end());
  const auto [offset, bytes] = *last;
  if (offset + bytes != stats_.committed) return;
  const size_t keep = std::min(RoundUp(offset, kGrowBytes), stats_.committed);
  if (keep == stats_.committed) return;
  RemoveFree(last);
  if (keep > offset) AddFree(offset, keep - offset);
  release_(keep, stats_.committed - keep);
  stats_.committed = keep;
}

ArenaStats Arena::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  ArenaStats result = stats_;
  result.largest_free = free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first;
  return result;
}

}  // namespace tvm_ipc
