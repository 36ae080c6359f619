/* SPDX-License-Identifier: Apache-2.0 */
/*! \file storage.cc */
#include "disco/storage.h"

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/json.h>

#include <atomic>
#include <memory>

#include "core/group.h"
#include "disco/tensor_view.h"
#include "disco/worker.h"
#include "shm/collectives.h"

namespace tvm_ipc {

namespace {

namespace ffi = tvm::ffi;
namespace memory = tvm::runtime::memory;

/*!
 * \brief Hands out the arena of one worker, to one of its threads.
 *
 * A storage may outlive the worker's thread and the session (the controller can hold a tensor of
 * worker 0), so the allocator lives until the last storage is gone.
 */
class ArenaAllocator final : public memory::Allocator {
 public:
  explicit ArenaAllocator(const Rank& rank)
      : Allocator(memory::kPooled), arena_(rank.arena()), base_(rank.arena_base()) {}

  bool IsOf(const Rank& rank) const { return arena_ == rank.arena(); }

  memory::Buffer Alloc(tvm::Device device, size_t bytes, size_t alignment, DLDataType) final {
    if (alignment > Arena::kAlignment) {
      Fail(kind::kValue, kIpcMemory, " is aligned to ", Arena::kAlignment, " bytes, not ",
           alignment);
    }
    memory::Buffer buffer;
    buffer.data = base_ + arena_->Allocate(bytes);
    buffer.size = bytes;
    buffer.device = device;
    buffer.alloc_type = memory::kPooled;
    references_.fetch_add(1, std::memory_order_relaxed);
    return buffer;
  }

  void Free(const memory::Buffer& buffer) final {
    arena_->Free(static_cast<size_t>(static_cast<uint8_t*>(buffer.data) - base_), buffer.size);
    Release();
  }

  void Clear() final { arena_->Trim(); }
  size_t UsedMemory() const final { return arena_->stats().in_use; }

  void Release() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 protected:
  bool AllowMemoryScope(const std::string& scope) const final {
    return scope.empty() || scope == "global" || scope == kIpcMemory;
  }

 private:
  std::shared_ptr<Arena> arena_;
  uint8_t* base_;
  /*! \brief The thread that made it, and every storage. */
  std::atomic<int64_t> references_{1};
};

ArenaAllocator* WorkerAllocator() {
  struct Holder {
    ArenaAllocator* allocator = nullptr;
    ~Holder() { Replace(nullptr); }
    void Replace(ArenaAllocator* other) {
      if (allocator != nullptr) allocator->Release();
      allocator = other;
    }
  };
  thread_local Holder holder;
  const Rank& rank = RequireRank();
  // A thread that acted for one rank may act for another one, of a later session.
  if (holder.allocator == nullptr || !holder.allocator->IsOf(rank)) {
    holder.Replace(new ArenaAllocator(rank));
  }
  return holder.allocator;
}

size_t SizeInBytes(const char* what, const ffi::Shape& shape, DLDataType dtype) {
  ElementType type{dtype.code, dtype.bits, dtype.lanes};
  uint64_t bytes = type.bytes();
  for (int64_t extent : shape) {
    if (extent < 0 || (extent > 0 && bytes > UINT64_MAX / static_cast<uint64_t>(extent))) {
      Fail(kind::kValue, what, ": the shape has no size in bytes; one extent is ", extent);
    }
    bytes *= static_cast<uint64_t>(extent);
  }
  return bytes;
}

}  // namespace

memory::Storage AllocStorage(ffi::Shape shape, DLDataType dtype) {
  const size_t bytes = SizeInBytes("alloc_storage", shape, dtype);
  ArenaAllocator* allocator = WorkerAllocator();
  return memory::Storage(allocator->Alloc(tvm::Device{kDLCPU, 0}, bytes, Arena::kAlignment, dtype),
                         allocator);
}

ffi::Tensor AllocTensor(memory::Storage storage, int64_t offset, ffi::Shape shape,
                        DLDataType dtype) {
  const size_t bytes = SizeInBytes("alloc_tensor", shape, dtype);
  const memory::Buffer& buffer = storage->buffer;
  if (offset < 0 || bytes > buffer.size || static_cast<size_t>(offset) > buffer.size - bytes) {
    Fail(kind::kValue, "alloc_tensor: ", bytes, " bytes at offset ", offset,
         " do not lie in a storage of ", buffer.size, " bytes");
  }
  // `byte_offset` stays 0: compiled kernels assert it.
  struct Inside {
    memory::Storage storage;
    void AllocData(DLTensor* tensor, int64_t offset) {
      tensor->data = static_cast<uint8_t*>(storage->buffer.data) + offset;
    }
    void FreeData(DLTensor*) {}
  };
  const tvm::Device device = buffer.device;
  return ffi::Tensor::FromNDAlloc(Inside{std::move(storage)}, shape, dtype, device, offset);
}

void RequireBounds(ffi::String what, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  Fail(kind::kValue, what, " is ", value, ", and the function was compiled for ", least, " to ",
       most, "; stay within that, or correct tir_var_lower_bound or tir_var_upper_bound");
}

void CopyTensor(ffi::Tensor source, ffi::Tensor target) {
  const DLTensor* from = source.GetDLTensorPtr();
  DLTensor* to = const_cast<DLTensor*>(target.GetDLTensorPtr());
  const size_t bytes = ffi::GetDataSize(*from);
  if (bytes != ffi::GetDataSize(*to) || !(source.dtype() == target.dtype())) {
    Fail(kind::kValue, "copy: the source has ", bytes, " bytes, the target ", ffi::GetDataSize(*to),
         "; their shapes and types must be equal");
  }
  if (bytes == 0) return;
  if (from->device.device_type != kDLCPU || to->device.device_type != kDLCPU) {
    tvm::runtime::Tensor::CopyFromTo(from, to);
    return;
  }
  const Buffer in = ViewBuffer("copy: source", from);
  const Buffer out = ViewBuffer("copy: target", to);
  CopyBytes(out.begin(), in.begin(), bytes, bytes >= kStreamBytes);
}

void ClearArena() {
  // Disco calls this right after init_ccl, whatever the backend.
  if (CurrentRank() != nullptr) WorkerAllocator()->Clear();
}

ffi::String ArenaStatistics() {
  const ArenaStats stats = RequireRank().arena()->stats();
  ffi::Map<ffi::String, ffi::Any> json;
  json.Set("limit", static_cast<int64_t>(stats.limit));
  json.Set("committed", static_cast<int64_t>(stats.committed));
  json.Set("in_use", static_cast<int64_t>(stats.in_use));
  json.Set("peak_in_use", static_cast<int64_t>(stats.peak_in_use));
  json.Set("largest_free", static_cast<int64_t>(stats.largest_free));
  json.Set("allocations", static_cast<int64_t>(stats.allocations));
  json.Set("growths", static_cast<int64_t>(stats.growths));
  return ffi::json::Stringify(json);
}

int64_t ArenaOffset(ffi::Tensor tensor) {
  const Rank& rank = RequireRank();
  const DLTensor* view = tensor.GetDLTensorPtr();
  const auto* data = static_cast<const uint8_t*>(view->data) + view->byte_offset;
  const int64_t offset = rank.OffsetOf(data, 0);
  return offset < 0 ? -1 : offset - static_cast<int64_t>(ArenaStart(rank.num_ranks()));
}

}  // namespace tvm_ipc
