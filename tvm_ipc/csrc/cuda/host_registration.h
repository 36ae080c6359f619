/* SPDX-License-Identifier: Apache-2.0 */
/*! \file host_registration.h
 *  \brief Host memory that devices access.
 */
#ifndef TVM_IPC_CUDA_HOST_REGISTRATION_H_
#define TVM_IPC_CUDA_HOST_REGISTRATION_H_

#include <cstddef>
#include <memory>
#include <utility>

#include "driver/device_properties_and_context.h"

namespace tvm_ipc::cuda {

/*! \brief Host memory that the driver has pinned, so that devices of this process can access it. */
class Pinned {
 public:
  /*! \brief Pin existing memory. It is pinned only once per process, however often it is
   *         registered. */
  static std::shared_ptr<Pinned> Register(const std::shared_ptr<Device>& device, void* data,
                                          size_t bytes);
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  /*! \brief Return the address of pinned memory on a device. */
  static Address On(const Device& device, void* data);

 private:
  Pinned(std::shared_ptr<Device> device, void* data) : device_(std::move(device)), data_(data) {}
  std::shared_ptr<Device> device_;
  void* data_;
};

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_HOST_REGISTRATION_H_
