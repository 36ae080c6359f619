// SPDX-License-Identifier: Apache-2.0
// The kernels as the build compiled them, in the library's own bytes: no user needs a compiler.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tvm_ipc::cuda {

// What one source became for one kind of device. PTX ends in a NUL, which belongs to it.
struct KernelImage {
  const char* source;  // its name without ".cu"
  int capability;      // 90 for 9.0: machine code for that major version, from that minor one on
  bool ptx;            // not machine code: the driver compiles it, for this capability or any later
  const uint8_t* data;
  const uint8_t* end;

  size_t size() const { return end - data; }
};

// None if the library was built with TVM_IPC_CUDA=OFF. Machine code comes before PTX.
extern const KernelImage kKernelImages[];
extern const size_t kNumKernelImages;

}  // namespace tvm_ipc::cuda
