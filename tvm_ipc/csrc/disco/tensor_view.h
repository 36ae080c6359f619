/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file tensor_view.h
 * \brief TVM's tensors as the core's buffers.
 */
#ifndef TVM_IPC_DISCO_TENSOR_VIEW_H_
#define TVM_IPC_DISCO_TENSOR_VIEW_H_

#include <tvm/ffi/container/tensor.h>

#include "core/backend.h"
#include "core/error.h"

namespace tvm_ipc {

/*! \brief The elements of a contiguous tensor on a device of the backend; `what` is for errors. */
inline Buffer ViewBuffer(const Backend& backend, const char* what,
                         const tvm::ffi::TensorView& tensor) {
  const int wanted = backend.capabilities().device_type;
  if (tensor.device().device_type != wanted) {
    Fail(kind::kValue, what, " is on device type ", static_cast<int>(tensor.device().device_type),
         "; the backend ", backend.name(), " works on tensors of device type ", wanted);
  }
  if (!tensor.IsContiguous()) {
    Fail(kind::kValue, what, " is not contiguous; make a contiguous copy first");
  }
  const DLDataType dtype = tensor.dtype();
  Buffer buffer;
  buffer.data = static_cast<uint8_t*>(tensor.data_ptr()) + tensor.byte_offset();
  buffer.count = static_cast<size_t>(tensor.numel());
  buffer.type = ElementType{dtype.code, dtype.bits, dtype.lanes};
  return buffer;
}

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_TENSOR_VIEW_H_
