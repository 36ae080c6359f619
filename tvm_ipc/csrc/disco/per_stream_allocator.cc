/* SPDX-License-Identifier: Apache-2.0 */
/*! \file per_stream_allocator.cc */
#include "disco/per_stream_allocator.h"

#include <tvm/runtime/memory/memory_manager.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/current_stream_hooks.h"

namespace tvm_ipc {

namespace {

namespace memory = tvm::runtime::memory;
using tvm::runtime::DeviceAPI;

/*! \brief Blocks are whole pages of this size, as in TVM's allocator. */
constexpr size_t kPage = 4096;

class StreamAllocator final : public memory::Allocator {
 public:
  StreamAllocator(tvm::Device device, memory::AllocatorType type)
      : Allocator(type), device_(device) {}

  using Allocator::Alloc;
  memory::Buffer Alloc(tvm::Device device, size_t bytes, size_t alignment, DLDataType hint) final {
    const size_t size = std::max((bytes + kPage - 1) / kPage * kPage, kPage);
    void* stream = ProgramStreams().current(device.device_type, device.device_id);
    memory::Buffer buffer;
    buffer.size = size;
    buffer.device = device;
    buffer.alloc_type = type();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto free = free_.find({stream, size});
      if (free != free_.end()) {
        buffer.data = free->second;
        free_.erase(free);
        used_[buffer.data] = stream;
        return buffer;
      }
    }
    // Without the lock, because these calls may wait for the device.
    DeviceAPI* api = DeviceAPI::Get(device);
    try {
      buffer.data = api->AllocDataSpace(device, size, alignment, hint);
    } catch (const std::exception&) {
      Clear();
      buffer.data = api->AllocDataSpace(device, size, alignment, hint);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    held_ += size;
    used_[buffer.data] = stream;
    return buffer;
  }

  void Free(const memory::Buffer& buffer) final {
    std::lock_guard<std::mutex> lock(mutex_);
    auto used = used_.find(buffer.data);
    if (used == used_.end()) return;
    free_.insert({{used->second, buffer.size}, buffer.data});
    used_.erase(used);
  }

  void Clear() final {
    decltype(free_) blocks;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      blocks.swap(free_);
      for (const auto& [key, block] : blocks) held_ -= key.second;
    }
    for (const auto& [key, block] : blocks) DeviceAPI::Get(device_)->FreeDataSpace(device_, block);
  }

  size_t UsedMemory() const final {
    std::lock_guard<std::mutex> lock(mutex_);
    return held_;
  }

 private:
  const tvm::Device device_;
  mutable std::mutex mutex_;
  /*! \brief Free blocks, by the stream that they were allocated for and by size. */
  std::multimap<std::pair<void*, size_t>, void*> free_;
  std::unordered_map<void*, void*> used_;
  size_t held_ = 0;
};

std::mutex shared_mutex;

/*! \brief Return the devices that workers of this process share. */
std::set<std::pair<int, int>>& Shared() {
  static auto* shared = new std::set<std::pair<int, int>>();
  return *shared;
}

}  // namespace

bool KeepBlocksByStream(tvm::Device device) {
  {
    std::lock_guard<std::mutex> lock(shared_mutex);
    Shared().insert({device.device_type, device.device_id});
  }
  auto* allocator = memory::MemoryManager::GetOrCreateAllocator(device, memory::kPooled);
  return dynamic_cast<StreamAllocator*>(allocator) != nullptr;
}

void* FindDeviceAllocator(tvm::Device device, int type) {
  std::lock_guard<std::mutex> lock(shared_mutex);
  if (Shared().count({device.device_type, device.device_id}) == 0) return nullptr;
  memory::Allocator* allocator =
      new StreamAllocator(device, static_cast<memory::AllocatorType>(type));
  return allocator;
}

}  // namespace tvm_ipc
