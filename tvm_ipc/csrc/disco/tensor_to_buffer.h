/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file tensor_to_buffer.h
 * \brief TVM's tensors as the core's buffers.
 */
#ifndef TVM_IPC_DISCO_TENSOR_TO_BUFFER_H_
#define TVM_IPC_DISCO_TENSOR_TO_BUFFER_H_

#include <tvm/ffi/container/tensor.h>

#include <string>

#include "core/communication_backend.h"
#include "core/error.h"
#include "core/rank_runtime_state.h"

namespace tvm_ipc {

/*! \brief Return the name of a device for errors, for example "the CPU" or "cuda:1". */
inline std::string NameOf(DLDevice device) {
  if (device.device_type == kDLCPU) return "the CPU";
  const std::string id = std::to_string(device.device_id);
  if (device.device_type == kDLCUDA) return "cuda:" + id;
  if (device.device_type == kDLCUDAHost) return "the CPU, in memory that is pinned for CUDA";
  return "device " + id + " of DLPack's type " + std::to_string(device.device_type);
}

/*! \brief Return the device of a rank's tensors. */
inline DLDevice DeviceOf(const Rank& rank) {
  const int32_t type = rank.backend().capabilities().device_type;
  return {static_cast<DLDeviceType>(type), rank.options().device};
}

/*! \brief View a contiguous tensor on the rank's device as a buffer; `name` is put together to its
 *         name in errors. */
template <typename... Name>
Buffer ViewBuffer(const Rank& rank, const tvm::ffi::TensorView& tensor, const Name&... name) {
  const DLDevice device = tensor.device();
  const DLDevice wanted = DeviceOf(rank);
  // The CPU's device number does not matter.
  const bool here = device.device_type == wanted.device_type &&
                    (device.device_id == wanted.device_id || wanted.device_type == kDLCPU);
  if (!here) {
    Fail(kind::kValue, name..., " is on ", NameOf(device), "; the backend ", rank.backend().name(),
         " works on tensors of ", NameOf(wanted), ", the device of rank ", rank.id(),
         ": copy it there");
  }
  if (!tensor.IsContiguous()) {
    Fail(kind::kValue, name..., " is not contiguous; make a contiguous copy first");
  }
  const DLDataType dtype = tensor.dtype();
  Buffer buffer;
  buffer.data = static_cast<uint8_t*>(tensor.data_ptr()) + tensor.byte_offset();
  buffer.count = static_cast<size_t>(tensor.numel());
  buffer.type = ElementType{dtype.code, dtype.bits, dtype.lanes};
  return buffer;
}

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_TENSOR_TO_BUFFER_H_
