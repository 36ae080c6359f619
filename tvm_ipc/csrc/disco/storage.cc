/* SPDX-License-Identifier: Apache-2.0 */
/*! \file storage.cc */
#include "disco/storage.h"

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/json.h>

#include <memory>
#include <utility>

#include "core/heap_interface.h"
#include "core/rank_runtime_state.h"
#include "disco/tensor_to_buffer.h"
#include "disco/worker_session_functions.h"

namespace tvm_ipc {

namespace {

namespace ffi = tvm::ffi;
namespace memory = tvm::runtime::memory;

/*!
 * \brief Hands out the heap of one worker, to one of its threads.
 *
 * A storage may outlive the worker's thread and the session (the controller can hold a tensor of
 * worker 0), so the allocator lives until the last storage is gone.
 */
class HeapAllocator final : public memory::Allocator, public SharedAllocator {
 public:
  explicit HeapAllocator(std::shared_ptr<Heap> heap)
      : Allocator(memory::kPooled), SharedAllocator(std::move(heap)) {}

  memory::Buffer Alloc(tvm::Device device, size_t bytes, size_t alignment, DLDataType) final {
    if (alignment > Arena::kAlignment) {
      Fail(kind::kValue, kIpcMemory, " is aligned to ", Arena::kAlignment, " bytes, not ",
           alignment);
    }
    memory::Buffer buffer;
    buffer.data = AllocateBlock(bytes);
    buffer.size = bytes;
    buffer.device = device;
    buffer.alloc_type = memory::kPooled;
    return buffer;
  }

  void Free(const memory::Buffer& buffer) final { FreeBlock(buffer.data, buffer.size); }
  void Clear() final { heap()->Trim(); }
  size_t UsedMemory() const final { return heap()->stats().in_use; }

 protected:
  bool AllowMemoryScope(const std::string& scope) const final {
    return scope.empty() || scope == "global" || scope == kIpcMemory;
  }
};

const std::shared_ptr<Heap>& HeapOf(const Rank& rank) {
  const std::shared_ptr<Heap>& heap = rank.endpoint().heap();
  if (heap == nullptr) {
    Fail(kind::kValue, "the backend ", rank.backend().name(), " has no memory that peers map");
  }
  return heap;
}

HeapAllocator* WorkerAllocator() {
  struct Holder {
    HeapAllocator* allocator = nullptr;
    ~Holder() { Replace(nullptr); }
    void Replace(HeapAllocator* other) {
      if (allocator != nullptr) allocator->Release();
      allocator = other;
    }
  };
  thread_local Holder holder;
  const std::shared_ptr<Heap>& heap = HeapOf(RequireRank());
  // A thread that acted for one rank may act for another one, of a later session.
  if (holder.allocator == nullptr || holder.allocator->heap() != heap) {
    holder.Replace(new HeapAllocator(heap));
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
  HeapAllocator* allocator = WorkerAllocator();
  const tvm::Device device = DeviceOf(RequireRank());
  return memory::Storage(allocator->Alloc(device, bytes, Arena::kAlignment, dtype), allocator);
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

ffi::Tensor ViewTensor(ffi::Tensor tensor, int64_t offset, ffi::Shape shape) {
  return ViewFor("view", std::move(tensor), offset, std::move(shape));
}

ffi::Tensor ViewFor(const char* function, ffi::Tensor tensor, int64_t offset, ffi::Shape shape) {
  if (!tensor.IsContiguous()) {
    Fail(kind::kValue, function, ": the tensor is not contiguous; make a contiguous copy first");
  }
  const size_t whole = ffi::GetDataSize(*tensor.GetDLTensorPtr());
  const size_t bytes = SizeInBytes(function, shape, tensor.dtype());
  if (offset < 0 || bytes > whole || static_cast<size_t>(offset) > whole - bytes) {
    Fail(kind::kValue, function, ": ", bytes, " bytes at offset ", offset,
         " do not lie in a tensor of ", whole, " bytes");
  }
  struct Inside {
    ffi::Tensor tensor;
    void AllocData(DLTensor* view, int64_t offset) {
      const DLTensor* whole = tensor.GetDLTensorPtr();
      view->data = static_cast<uint8_t*>(whole->data) + whole->byte_offset + offset;
    }
    void FreeData(DLTensor*) {}
  };
  const DLDataType dtype = tensor.dtype();
  const tvm::Device device = tensor.device();
  return ffi::Tensor::FromNDAlloc(Inside{std::move(tensor)}, shape, dtype, device, offset);
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
  const Rank* rank = CurrentRank();
  auto here = [device = rank == nullptr ? DLDevice{} : DeviceOf(*rank)](const DLDevice& other) {
    return other.device_type == device.device_type &&
           (other.device_type == kDLCPU || other.device_id == device.device_id);
  };
  if (rank == nullptr || !here(from->device) || !here(to->device)) {
    tvm::runtime::Tensor::CopyFromTo(from, to);
    return;
  }
  rank->endpoint().Copy(ViewBuffer(*rank, from, "copy: source"),
                        ViewBuffer(*rank, to, "copy: target"));
}

void ClearArena() {
  // Disco calls this right after init_ccl, whatever the backend.
  if (CurrentRank() != nullptr) WorkerAllocator()->Clear();
}

ffi::String ArenaStatistics() {
  const Rank& rank = RequireRank();
  const ArenaStats stats = HeapOf(rank)->stats();
  ffi::Map<ffi::String, ffi::Any> json;
  std::string why;
  if (std::string way = rank.endpoint().SharingModeName(&why); !way.empty()) {
    json.Set("way", ffi::String(way));
    json.Set("why", ffi::String(why));
  }
  json.Set("limit", static_cast<int64_t>(stats.limit));
  json.Set("committed", static_cast<int64_t>(stats.committed));
  json.Set("in_use", static_cast<int64_t>(stats.in_use));
  json.Set("peak_in_use", static_cast<int64_t>(stats.peak_in_use));
  json.Set("largest_free", static_cast<int64_t>(stats.largest_free));
  json.Set("allocations", static_cast<int64_t>(stats.allocations));
  json.Set("growths", static_cast<int64_t>(stats.growths));
  return ffi::json::Stringify(json);
}

int64_t BytesReceived() { return static_cast<int64_t>(RequireRank().endpoint().BytesReceived()); }

int64_t ArenaOffset(ffi::Tensor tensor) {
  const DLTensor* view = tensor.GetDLTensorPtr();
  const auto* data = static_cast<const uint8_t*>(view->data) + view->byte_offset;
  return HeapOf(RequireRank())->Offset(data);
}

}  // namespace tvm_ipc
