/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file scratch_memory.h
 * \brief Memory of one thread that later calls reuse.
 */
#ifndef TVM_IPC_BLAS_SCRATCH_MEMORY_H_
#define TVM_IPC_BLAS_SCRATCH_MEMORY_H_

#include <cstdint>
#include <cstdlib>
#include <new>

namespace tvm_ipc {

/*! \brief Floats, aligned to 64 bytes. */
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  float* Floats(int64_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = 0;
      const size_t bytes = (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64;
      data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = count;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_SCRATCH_MEMORY_H_
