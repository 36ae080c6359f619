/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file memory.h
 * \brief Memory that other ranks map: made, exported and imported in three ways.
 */
#ifndef TVM_IPC_CUDA_MEMORY_H_
#define TVM_IPC_CUDA_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/exchange.h"
#include "driver/device.h"

namespace tvm_ipc::cuda {

/*! \brief The ways, the best first. */
enum class Rung : int32_t {
  /*! \brief The driver's virtual memory, as a file descriptor. */
  kFiles = 0,
  /*! \brief An allocation, by the handle that cudaIpcGetMemHandle gives; within a process its
   *         address. */
  kLegacy = 1,
  /*! \brief Memory of the host, pinned: devices need not reach each other. */
  kHost = 2,
  kNone = 3,
};
/*! \brief "vmm", "legacy", "host", "none". */
const char* NameOf(Rung rung);

/*! \brief Memory at an address that the device sees. */
class Memory {
 public:
  virtual ~Memory() = default;
  Address base() const { return base_; }
  size_t bytes() const { return bytes_; }

 protected:
  Address base_ = 0;
  size_t bytes_ = 0;
};

/*! \brief A rank's own, until nobody holds it. */
class OwnMemory : public Memory {
 public:
  /*! \brief What others need to import it. */
  virtual Exported Export() const = 0;
};

/*! \brief Memory of the device that nobody else maps. */
std::shared_ptr<Memory> AllocatePlain(const std::shared_ptr<Device>& device, size_t bytes);
/*!
 * \brief Memory that others can map, all zeros or not; throws where the device cannot have it so.
 * \param mapped How many other ranks map it now: it is freed only when none does.
 */
std::shared_ptr<OwnMemory> Allocate(Rung rung, const std::shared_ptr<Device>& device, size_t bytes,
                                    std::shared_ptr<std::atomic<int32_t>> mapped);
/*!
 * \brief What a rank exported, mapped for the device; throws where the device cannot reach it.
 * \param mapped The owner's count, which goes up by one until the memory ends.
 */
std::shared_ptr<Memory> Import(Rung rung, const std::shared_ptr<Device>& device, Exported exported,
                               std::shared_ptr<std::atomic<int32_t>> mapped);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_MEMORY_H_
