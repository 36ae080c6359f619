// SPDX-License-Identifier: Apache-2.0
// Runs the blocks of a launch in a stream's thread.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_GRID_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_GRID_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "block.h"

namespace cuda_double {

// How many blocks of a kernel a multiprocessor has at a time.
int BlocksOfMultiprocessor(const CpuKernel& kernel, size_t threads, size_t dynamic_shared);

// One for each stream's thread.
class GridRunner {
 public:
  GridRunner();
  // A block runs until it ends or all of it waits for other memory; then others begin, as many as
  // the device has room for, and go on by turns. Throws Failure.
  void Run(const Launch& launch);
  // Runs something that touches device memory, but is no kernel.
  void RunGuarded(const std::function<void()>& body);

 private:
  void RunBlocks(const Launch& launch);
  std::unique_ptr<Block> TakeBlock();

  FiberPool pool_;
  std::vector<std::unique_ptr<Block>> idle_;
  std::vector<std::unique_ptr<Block>> resident_;
  std::vector<void*> arguments_;
  std::mt19937_64 random_;
};

}  // namespace cuda_double

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_GRID_H_
