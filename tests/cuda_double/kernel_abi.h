// SPDX-License-Identifier: Apache-2.0
// How a kernel that was compiled for the CPU is found and run. A shared library with kernels
// exports, for each kernel `name`, one `const CpuKernel tvm_ipc_cpu_kernel_<name>`. Whoever runs it
// (the double's fibers, or a test with a thread for each CUDA thread) makes a CpuThread for each
// thread of the grid.
//
// A library keeps the CpuThread that runs in a `thread_local` of its own. Fibers share a thread, so
// what calls `barrier`, `warp_barrier` or `pause` has to set that variable again when the call
// returns.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_KERNEL_ABI_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_KERNEL_ABI_H_

#include <stdint.h>

enum { kCpuKernelAbi = 1, kCpuWarp = 32 };

struct CpuDim {
  uint32_t x, y, z;
};

struct CpuThread {
  struct CpuDim thread;      // threadIdx
  struct CpuDim block;       // blockIdx
  struct CpuDim block_size;  // blockDim
  struct CpuDim grid;        // gridDim
  void* static_shared;       // CpuKernel::static_shared bytes, one for the block
  void* dynamic_shared;      // what the launch asked for; both are poisoned before each block
  uint64_t (*lanes)[2];  // [kCpuWarp]: 16 bytes for each lane of the warp, for shuffles and votes
  void (*barrier)(struct CpuThread*);                       // __syncthreads
  void (*warp_barrier)(struct CpuThread*, uint32_t lanes);  // __syncwarp
  void (*pause)(
      struct CpuThread*);  // call it in each turn of a loop that waits for memory to change
  void* runner;            // whoever runs it
};

struct CpuKernel {
  uint32_t abi;           // kCpuKernelAbi
  uint32_t parameters;    // how many
  const uint32_t* sizes;  // bytes of each
  void (*run)(struct CpuThread*, void* const* arguments);
  uint32_t static_shared;  // bytes at CpuThread::static_shared, 0 if the kernel has its own
  uint32_t max_threads;    // of a block: __launch_bounds__, or 1024
};

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_KERNEL_ABI_H_
