// SPDX-License-Identifier: Apache-2.0
// Runs the blocks of a launch, one after another, on fibers.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_GRID_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_GRID_H_

#include <cstddef>
#include <memory>
#include <random>
#include <vector>

#include "../kernel_abi.h"
#include "fibers.h"

namespace cuda_double {

struct Launch {
  const CpuKernel* kernel = nullptr;
  CpuDim grid{}, block{};
  size_t dynamic_shared = 0;
  std::vector<std::vector<char>> arguments;
};

// One for each stream's thread.
class GridRunner {
 public:
  GridRunner();
  ~GridRunner();
  void Run(const Launch& launch);  // throws Failure
  // Runs something that touches device memory, but is no kernel.
  void RunGuarded(const std::function<void()>& body);

 private:
  enum class State { kFresh, kReady, kAtBarrier, kAtWarpBarrier, kDone };
  struct Thread {
    CpuThread cpu{};
    State state = State::kFresh;
    uint32_t lanes = 0;  // whom it waits for at a warp's barrier
    std::unique_ptr<Fiber> fiber;
  };

  static void Barrier(CpuThread* cpu);
  static void WarpBarrier(CpuThread* cpu, uint32_t lanes);
  static void Pause(CpuThread* cpu);
  static GridRunner& Of(CpuThread* cpu) { return *static_cast<GridRunner*>(cpu->runner); }

  void RunBlock(const Launch& launch, CpuDim block);
  void Step(const Launch& launch, Thread& thread);
  bool ReleaseBarrier();
  bool ReleaseWarps();
  std::unique_ptr<Fiber> TakeFiber();
  void Abandon();
  char* Shared(size_t bytes, size_t from_end);

  std::vector<Thread> threads_;
  std::vector<size_t> order_;
  std::vector<uint64_t[2]> lanes_;
  std::vector<std::unique_ptr<Fiber>> idle_;
  std::vector<void*> arguments_;
  Thread* now_ = nullptr;
  bool paused_ = false;
  char* shared_ = nullptr;
  std::mt19937_64 random_;
};

}  // namespace cuda_double

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_GRID_H_
