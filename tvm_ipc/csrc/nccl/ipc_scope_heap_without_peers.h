/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file ipc_scope_heap_without_peers.h
 * \brief The heap of the scope "ipc_memory" for the backend nccl: device memory that no peer maps.
 */
#ifndef TVM_IPC_NCCL_IPC_SCOPE_HEAP_WITHOUT_PEERS_H_
#define TVM_IPC_NCCL_IPC_SCOPE_HEAP_WITHOUT_PEERS_H_

#include <memory>
#include <mutex>
#include <vector>

#include "core/heap_interface.h"
#include "driver/device_properties_and_context.h"

namespace tvm_ipc::nccl {

/*!
 * \brief A heap in a few large pieces of device memory that NCCL allocates. If the machine supports
 *        it, NCCL sends and receives in such memory without staging copies.
 */
class DeviceHeap final : public Heap {
 public:
  /*! \param limit The maximum size of all pieces, in bytes; 0 for the device's whole memory. */
  DeviceHeap(std::shared_ptr<cuda::Device> device, size_t limit);
  ~DeviceHeap() final;

  void* Allocate(size_t bytes) final;
  void Free(void* data, size_t bytes) final;
  /*! \brief Free the pieces that are unused. */
  void Trim() final;
  ArenaStats stats() const final;
  int64_t Offset(const void* data) const final;

 private:
  struct Piece {
    uint8_t* base;
    size_t bytes;
    /*! \brief The heap offset at which this piece begins. */
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
#endif  // TVM_IPC_NCCL_IPC_SCOPE_HEAP_WITHOUT_PEERS_H_
