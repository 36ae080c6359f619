/* SPDX-License-Identifier: Apache-2.0 */
/*! \file pinned.h
 *  \brief Memory of the host that devices use.
 */
#ifndef TVM_IPC_CUDA_PINNED_H_
#define TVM_IPC_CUDA_PINNED_H_

#include <cstddef>
#include <memory>
#include <utility>

#include "driver/device.h"

namespace tvm_ipc::cuda {

/*! \brief Host memory that the driver has pinned, as devices of this process see it. */
class Pinned {
 public:
  /*! \brief Pins memory that is there; once for all in this process that do. */
  static std::shared_ptr<Pinned> Register(const std::shared_ptr<Device>& device, void* data,
                                          size_t bytes);
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  /*! \brief Where a device sees it. */
  static Address On(const Device& device, void* data);

 private:
  Pinned(std::shared_ptr<Device> device, void* data) : device_(std::move(device)), data_(data) {}
  std::shared_ptr<Device> device_;
  void* data_;
};

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_PINNED_H_
