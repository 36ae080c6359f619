/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file tensor_view.h
 * \brief Tensors as arguments of matmuls and attention, with their axes in the requested order.
 */
#ifndef TVM_IPC_BLAS_TENSOR_VIEW_H_
#define TVM_IPC_BLAS_TENSOR_VIEW_H_

#include <tvm/ffi/container/tensor.h>

#include <string>

#include "blas/matmul_multi_thread.h"
#include "core/error.h"

namespace tvm_ipc {

constexpr int kMaxDims = kMaxBatchDims + 2;

/*! \brief Throw an error of a packed function. */
template <typename... Args>
[[noreturn]] void RefuseArgument(const char* function, const Args&... args) {
  Fail(kind::kValue, function, ": ", args...);
}

inline std::string ShapeText(const DLTensor& tensor) {
  std::string text = "(";
  for (int d = 0; d < tensor.ndim; ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(tensor.shape[d]);
  }
  return text + ")";
}

inline FloatType TypeOf(const char* function, const char* what, DLDataType type) {
  if (type.lanes == 1) {
    if (type.code == kDLFloat && type.bits == 32) return kFloat32;
    if (type.code == kDLFloat && type.bits == 64) return kFloat64;
    if (type.code == kDLFloat && type.bits == 16) return kFloat16;
    if (type.code == kDLBfloat && type.bits == 16) return kBFloat16;
  }
  RefuseArgument(function, what, " has elements of code ", static_cast<int>(type.code), " with ",
                 static_cast<int>(type.bits),
                 " bits; float16, bfloat16, float32 and float64 are known");
}

/*! \brief A tensor's memory, shape and strides, with its axes in the requested order. */
struct View {
  const char* what;
  const DLTensor* tensor;
  FloatType type;
  const char* data;
  int ndim;
  int64_t shape[kMaxDims];
  int64_t stride[kMaxDims];

  View(const char* function, const char* what, const tvm::ffi::AnyView& argument, int64_t axes)
      : what(what) {
    auto given = argument.try_cast<DLTensor*>();
    if (!given.has_value()) RefuseArgument(function, what, " is no tensor");
    tensor = *given;
    type = TypeOf(function, what, tensor->dtype);
    if (tensor->device.device_type != kDLCPU) {
      RefuseArgument(function, what, " is on device type ",
                     static_cast<int>(tensor->device.device_type), "; it must be on the CPU");
    }
    ndim = tensor->ndim;
    if (ndim > kMaxDims)
      RefuseArgument(function, what, " has ", ndim, " dimensions; at most ", kMaxDims, " may be");
    data = static_cast<const char*>(tensor->data) + tensor->byte_offset;
    int64_t lies[kMaxDims];
    int64_t elements = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      lies[d] = elements;
      elements *= tensor->shape[d];
    }
    for (int d = 0; d < ndim; ++d) {
      if (tensor->strides != nullptr && elements > 0 && tensor->shape[d] != 1 &&
          tensor->strides[d] != lies[d]) {
        RefuseArgument(function, what, " is not contiguous; make a contiguous copy first");
      }
      const int64_t axis = axes == 0 ? d : (axes >> (4 * d)) & 15;
      if (axis >= ndim) {
        RefuseArgument(function, what, " ", ShapeText(*tensor), " has no axis ", axis, " (axes ",
                       axes, ")");
      }
      shape[d] = tensor->shape[axis];
      stride[d] = lies[axis];
    }
  }
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_TENSOR_VIEW_H_
