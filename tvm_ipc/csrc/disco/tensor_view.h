/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file tensor_view.h
 * \brief TVM's tensors as the core's buffers.
 */
#ifndef TVM_IPC_DISCO_TENSOR_VIEW_H_
#define TVM_IPC_DISCO_TENSOR_VIEW_H_

#include <tvm/ffi/container/tensor.h>

#include "core/error.h"
#include "shm/collectives.h"

namespace tvm_ipc {

/*! \brief The elements of a contiguous CPU tensor; `what` names it in errors. */
inline Buffer ViewBuffer(const char* what, const tvm::ffi::TensorView& tensor) {
  if (tensor.device().device_type != kDLCPU) {
    Fail(kind::kValue, what, " is on device type ", static_cast<int>(tensor.device().device_type),
         "; the shm backend works on CPU tensors (device type ", static_cast<int>(kDLCPU), ")");
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
