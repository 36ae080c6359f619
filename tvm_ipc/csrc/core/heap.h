/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file heap.h
 * \brief Memory of a rank that its peers map, and what hands out blocks of it.
 */
#ifndef TVM_IPC_CORE_HEAP_H_
#define TVM_IPC_CORE_HEAP_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/arena.h"

namespace tvm_ipc {

/*! \brief It lasts as long as anybody holds it, be the rank and the session gone. */
class Heap {
 public:
  virtual ~Heap() = default;
  /*! \brief A block, aligned to Arena::kAlignment. */
  virtual void* Allocate(size_t bytes) = 0;
  /*! \brief Any thread may free. */
  virtual void Free(void* data, size_t bytes) = 0;
  /*! \brief Give what no block uses back to the system. */
  virtual void Trim() = 0;
  virtual ArenaStats stats() const = 0;
  /*! \brief Where the data lies in the heap; -1 if it lies elsewhere. */
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
 * \brief Hands out blocks of a heap to those who know of it by a bare pointer, as TVM's storages
 *        know their allocator. It ends with the last of its maker and the blocks.
 */
class Lender {
 public:
  explicit Lender(std::shared_ptr<Heap> heap) : heap_(std::move(heap)) {}
  Lender(const Lender&) = delete;
  Lender& operator=(const Lender&) = delete;

  void* Lend(size_t bytes) {
    void* data = heap_->Allocate(bytes);
    // Whoever lends is a user already, so nobody can be the last one meanwhile.
    users_.fetch_add(1, std::memory_order_relaxed);
    return data;
  }
  /*! \brief A block comes back, from any thread. The lender may be gone then. */
  void TakeBack(void* data, size_t bytes) {
    heap_->Free(data, bytes);
    Release();
  }
  /*! \brief The maker will lend no more. The lender may be gone then. */
  void Release() {
    // Release: what this user did comes before the end. Acquire: so does what all others did.
    if (users_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
  const std::shared_ptr<Heap>& heap() const { return heap_; }

 protected:
  virtual ~Lender() = default;

 private:
  const std::shared_ptr<Heap> heap_;
  /*! \brief The maker and every block. */
  std::atomic<int64_t> users_{1};
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_HEAP_H_
