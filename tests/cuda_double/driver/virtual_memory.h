// SPDX-License-Identifier: Apache-2.0
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_VIRTUAL_MEMORY_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_VIRTUAL_MEMORY_H_

#include <cstddef>

namespace cuda_double {

size_t MemoryHandles();
size_t ReservedRanges();

}  // namespace cuda_double

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_VIRTUAL_MEMORY_H_
