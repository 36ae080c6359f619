/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file exportable_memory.h
 * \brief Memory that other ranks map. It can be allocated, exported and imported in three ways.
 */
#ifndef TVM_IPC_CUDA_EXPORTABLE_MEMORY_H_
#define TVM_IPC_CUDA_EXPORTABLE_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/handle_allgather_via_session_server.h"
#include "driver/device_properties_and_context.h"

namespace tvm_ipc::cuda {

/*! \brief The ways to share memory, the best first. */
enum class SharingMode : int32_t {
  /*! \brief The driver's virtual memory, shared as a file descriptor. */
  kFiles = 0,
  /*! \brief A plain allocation, shared as an IPC handle (cuIpcGetMemHandle); within a process, as
   *         an address. */
  kLegacy = 1,
  /*! \brief Pinned host memory. The devices need no peer access. */
  kHost = 2,
  kNone = 3,
};
/*! \brief Return the name of a mode: "vmm", "legacy", "host" or "none". */
const char* NameOf(SharingMode mode);

/*! \brief Memory at an address that the device can access. */
class Memory {
 public:
  virtual ~Memory() = default;
  Address base() const { return base_; }
  size_t bytes() const { return bytes_; }

 protected:
  Address base_ = 0;
  size_t bytes_ = 0;
};

/*! \brief Memory that a rank owns and can export. */
class OwnMemory : public Memory {
 public:
  /*! \brief Return what other ranks need to import it. */
  virtual Exported Export() const = 0;
};

/*! \brief Allocate device memory that is not shared. */
std::shared_ptr<Memory> AllocatePlain(const std::shared_ptr<Device>& device, size_t bytes);
/*!
 * \brief Allocate memory that other ranks can map; its contents are unspecified. Throw if the
 *        device does not support the mode.
 * \param mapped The number of other ranks that currently map the memory. Memory of the mode kLegacy
 *        is freed only when it is zero.
 */
std::shared_ptr<OwnMemory> Allocate(SharingMode mode, const std::shared_ptr<Device>& device,
                                    size_t bytes, std::shared_ptr<std::atomic<int32_t>> mapped);
/*!
 * \brief Map memory that a rank exported. Throw if the device cannot access it.
 * \param mapped The owner's count, which is one higher while the returned memory exists.
 */
std::shared_ptr<Memory> Import(SharingMode mode, const std::shared_ptr<Device>& device,
                               Exported exported, std::shared_ptr<std::atomic<int32_t>> mapped);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_EXPORTABLE_MEMORY_H_
