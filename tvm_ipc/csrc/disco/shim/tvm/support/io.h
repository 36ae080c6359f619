/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file tvm/support/io.h
 * \brief Stands in for a header that the apache-tvm wheel's own headers include and the wheel
 *        does not carry. Declares only what `tvm/runtime/tensor.h` names; nothing here calls it.
 */
#ifndef TVM_IPC_SHIM_TVM_SUPPORT_IO_H_
#define TVM_IPC_SHIM_TVM_SUPPORT_IO_H_

#include <cstddef>

namespace tvm {
namespace support {

class Stream {
 public:
  virtual ~Stream() = default;
  virtual size_t Read(void* data, size_t size) = 0;
  virtual size_t Write(const void* data, size_t size) = 0;
  template <typename T>
  bool Read(T* value) {
    return Read(static_cast<void*>(value), sizeof(T)) == sizeof(T);
  }
  template <typename T>
  void Write(const T& value) {
    Write(static_cast<const void*>(&value), sizeof(T));
  }
  template <typename T>
  bool ReadArray(T* data, size_t count) {
    return Read(static_cast<void*>(data), count * sizeof(T)) == count * sizeof(T);
  }
  template <typename T>
  void WriteArray(const T* data, size_t count) {
    Write(static_cast<const void*>(data), count * sizeof(T));
  }
};

}  // namespace support
}  // namespace tvm
#endif  // TVM_IPC_SHIM_TVM_SUPPORT_IO_H_
