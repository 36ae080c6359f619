/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file heap_interface.h
 * \brief Memory of a rank that its peers map, and the allocator of its blocks.
 */
#ifndef TVM_IPC_CORE_HEAP_INTERFACE_H_
#define TVM_IPC_CORE_HEAP_INTERFACE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/arena_allocator.h"

namespace tvm_ipc {

/*! \brief Peer-mapped memory. It may outlive the rank and the session. */
class Heap {
 public:
  virtual ~Heap() = default;
  /*! \brief Allocate a block, aligned to Arena::kAlignment. */
  virtual void* Allocate(size_t bytes) = 0;
  /*! \brief Free a block; any thread may call this. */
  virtual void Free(void* data, size_t bytes) = 0;
  /*! \brief Return unused memory to the system. */
  virtual void Trim() = 0;
  virtual ArenaStats stats() const = 0;
  /*! \brief Return the offset of data in the heap; -1 if it is elsewhere. */
  virtual int64_t Offset(const void* data) const = 0;
};

/*! \brief An arena that is mapped at an address. */
class ArenaHeap final : public Heap {
 public:
  ArenaHeap(std::shared_ptr<Arena> arena, uint8_t* base) : arena_(std::move(arena)), base_(base) {}

  void* Allocate(size_t bytes) final { return base_ + arena_->Allocate(bytes); }
  void Free(void* data, size_t bytes) final {
    arena_->Free(static_cast<size_t>(static_cast<uint8_t*>(data) - base_), bytes);
  }
  void Trim() final { arena_->Trim(); }
  ArenaStats stats() const final { return arena_->stats(); }
  int64_t Offset(const void* data) const final {
    const auto* byte = static_cast<const uint8_t*>(data);
    return byte < base_ || byte > base_ + stats().limit ? -1 : byte - base_;
  }

 private:
  std::shared_ptr<Arena> arena_;
  uint8_t* base_;
};

/*!
 * \brief Allocates blocks of a heap for users that hold a raw pointer to it, as TVM's storages hold
 *        their allocator. It is reference counted by its creator and its blocks.
 */
class SharedAllocator {
 public:
  explicit SharedAllocator(std::shared_ptr<Heap> heap) : heap_(std::move(heap)) {}
  SharedAllocator(const SharedAllocator&) = delete;
  SharedAllocator& operator=(const SharedAllocator&) = delete;

  void* AllocateBlock(size_t bytes) {
    void* data = heap_->Allocate(bytes);
    // The caller holds a reference already, so the count cannot reach zero meanwhile.
    users_.fetch_add(1, std::memory_order_relaxed);
    return data;
  }
  /*! \brief Free a block, from any thread. This may delete the allocator. */
  void FreeBlock(void* data, size_t bytes) {
    heap_->Free(data, bytes);
    Release();
  }
  /*! \brief Drop the creator's reference. This may delete the allocator. */
  void Release() {
    // Release: this user's accesses happen before the deletion. Acquire: so do all others'.
    if (users_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
  const std::shared_ptr<Heap>& heap() const { return heap_; }

 protected:
  virtual ~SharedAllocator() = default;

 private:
  const std::shared_ptr<Heap> heap_;
  /*! \brief The number of references: one of the creator, and one of every block. */
  std::atomic<int64_t> users_{1};
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_HEAP_INTERFACE_H_
