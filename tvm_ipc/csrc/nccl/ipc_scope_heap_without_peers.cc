/* SPDX-License-Identifier: Apache-2.0 */
/*! \file ipc_scope_heap_without_peers.cc */
#include "nccl/ipc_scope_heap_without_peers.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "core/error.h"
#include "nccl/library.h"

namespace tvm_ipc::nccl {

namespace {

constexpr size_t kPieceBytes = 64 << 20;

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

DeviceHeap::DeviceHeap(std::shared_ptr<cuda::Device> device, size_t limit)
    : device_(std::move(device)), limit_(limit == 0 ? device_->facts().memory : limit) {}

DeviceHeap::~DeviceHeap() {
  if (device_->in_forked_child() || pieces_.empty()) return;
  // Use another thread: the last owner may be an exiting thread, whose thread-local state of the
  // driver is already destroyed.
  std::thread([this] {
    try {
      const cuda::Here here(*device_);
      for (const Piece& piece : pieces_) TheLibrary().MemFree(piece.base);
    } catch (const Error&) {
      // The driver has already shut down, at the end of the process, and has freed the memory.
    }
  }).join();
}

void* DeviceHeap::Allocate(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t rounded = RoundUp(std::max<size_t>(bytes, 1), Arena::kAlignment);
  auto fits = [&](const Piece& piece) {
    const ArenaStats stats = piece.arena->stats();
    return std::max(stats.largest_free, stats.limit - stats.committed) >= rounded;
  };
  auto found = std::find_if(pieces_.begin(), pieces_.end(), fits);
  Piece& piece = found != pieces_.end() ? *found : Grow(rounded);
  void* data = piece.base + piece.arena->Allocate(bytes);
  in_use_ += rounded;
  peak_in_use_ = std::max(peak_in_use_, in_use_);
  ++allocations_;
  return data;
}

DeviceHeap::Piece& DeviceHeap::Grow(size_t bytes) {
  size_t all = 0;
  for (const Piece& piece : pieces_) all += piece.bytes;
  const size_t size =
      RoundUp(std::max(bytes, std::min(kPieceBytes, limit_ - all)), Arena::kGrowBytes);
  if (bytes > limit_ - all) {
    Fail(kind::kMemory, "the arena of ", limit_, " bytes on ", device_->name(), " has ",
         limit_ - all, " left, needed are ", bytes, "; raise arena_limit (TVM_IPC_ARENA_LIMIT)");
  }
  const cuda::Here here(*device_);
  void* base = nullptr;
  const Result result = TheLibrary().MemAlloc(&base, size);
  if (result != kSuccess) {
    Fail(kind::kMemory, device_->name(), " has no memory for ", size,
         " bytes more: ncclMemAlloc: ", TheLibrary().Describe(result));
  }
  Piece piece{static_cast<uint8_t*>(base), size, next_start_, nullptr};
  // The arena does not grow: all of the piece is allocated already.
  piece.arena =
      std::make_unique<Arena>(size, [](size_t, size_t) { return true; }, [](size_t, size_t) {});
  next_start_ += size;
  ++growths_;
  pieces_.push_back(std::move(piece));
  return pieces_.back();
}

DeviceHeap::Piece* DeviceHeap::Of(const void* data) {
  const auto* byte = static_cast<const uint8_t*>(data);
  for (Piece& piece : pieces_) {
    if (byte >= piece.base && byte < piece.base + piece.bytes) return &piece;
  }
  return nullptr;
}

void DeviceHeap::Free(void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Piece* piece = Of(data);
  if (piece == nullptr) return;
  piece->arena->Free(static_cast<size_t>(static_cast<uint8_t*>(data) - piece->base), bytes);
  in_use_ -= RoundUp(std::max<size_t>(bytes, 1), Arena::kAlignment);
}

void DeviceHeap::Trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  const cuda::Here here(*device_);
  auto unused = [](const Piece& piece) {
    // NCCL waits until the device no longer uses the piece.
    return piece.arena->stats().in_use == 0 && TheLibrary().MemFree(piece.base) == kSuccess;
  };
  pieces_.erase(std::remove_if(pieces_.begin(), pieces_.end(), unused), pieces_.end());
}

ArenaStats DeviceHeap::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  ArenaStats all;
  all.limit = limit_;
  all.in_use = in_use_;
  all.peak_in_use = peak_in_use_;
  all.allocations = allocations_;
  all.growths = growths_;
  for (const Piece& piece : pieces_) {
    const ArenaStats stats = piece.arena->stats();
    all.committed += piece.bytes;
    all.largest_free =
        std::max({all.largest_free, stats.largest_free, stats.limit - stats.committed});
  }
  return all;
}

int64_t DeviceHeap::Offset(const void* data) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Piece* piece = const_cast<DeviceHeap*>(this)->Of(data);
  if (piece == nullptr) return -1;
  return static_cast<int64_t>(piece->start) + (static_cast<const uint8_t*>(data) - piece->base);
}

}  // namespace tvm_ipc::nccl
