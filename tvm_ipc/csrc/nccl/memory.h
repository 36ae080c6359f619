/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file memory.h
 * \brief The memory that programs get as "ipc_memory" where no peer maps any: the device's.
 */
#ifndef TVM_IPC_NCCL_MEMORY_H_
#define TVM_IPC_NCCL_MEMORY_H_

#include <memory>
#include <mutex>
#include <vector>

#include "core/heap.h"
#include "driver/device.h"

namespace tvm_ipc::nccl {

/*!
 * \brief Blocks of a device's memory, out of a few large pieces that NCCL makes: it moves data
 *        there without copies of its own where the machine lets it.
 */
class DeviceHeap final : public Heap {
 public:
  /*! \param limit The most bytes of all pieces; 0 is what the device has. */
  DeviceHeap(std::shared_ptr<cuda::Device> device, size_t limit);
  ~DeviceHeap() final;

  void* Allocate(size_t bytes) final;
  void Free(void* data, size_t bytes) final;
  /*! \brief Give pieces of which nothing is used back. */
  void Trim() final;
  ArenaStats stats() const final;
  int64_t Offset(const void* data) const final;

 private:
  struct Piece {
    uint8_t* base;
    size_t bytes;
    /*! \brief Where the heap's offsets of this piece begin. */
    size_t start;
    std::unique_ptr<Arena> arena;
  };

  Piece& Grow(size_t bytes);
  Piece* Of(const void* data);

  std::shared_ptr<cuda::Device> device_;
  size_t limit_;
  mutable std::mutex mutex_;
  std::vector<Piece> pieces_;
  size_t next_start_ = 0;
  size_t in_use_ = 0;
  size_t peak_in_use_ = 0;
  uint64_t allocations_ = 0;
  uint64_t growths_ = 0;
};

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_MEMORY_H_
