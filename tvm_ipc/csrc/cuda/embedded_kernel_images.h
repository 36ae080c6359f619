// SPDX-License-Identifier: Apache-2.0
// The compiled kernels, embedded in the library, so that users need no compiler.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tvm_ipc::cuda {

// The image of one source for one target. PTX ends in a NUL, which is part of the image.
struct KernelImage {
  const char* source;  // its name without ".cu"
  int capability;      // 90 for 9.0. Machine code runs on 9.x from that minor version on
  bool ptx;            // not machine code: the driver compiles it for this or a later capability
  const uint8_t* data;
  const uint8_t* end;

  size_t size() const { return end - data; }
};

// All images, machine code before PTX. There are none if the library is built with
// TVM_IPC_CUDA=OFF.
extern const KernelImage kKernelImages[];
extern const size_t kNumKernelImages;

}  // namespace tvm_ipc::cuda
