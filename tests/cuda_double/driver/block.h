// SPDX-License-Identifier: Apache-2.0
// A block of a launch: its threads are fibers, and it has shared memory.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_BLOCK_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_BLOCK_H_

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

// Stacks that nobody uses, for the blocks of a stream.
class FiberPool {
 public:
  std::unique_ptr<Fiber> Take();
  // Whoever did not end is begun anew when it is taken again; nothing on its stack is owned.
  void Put(std::unique_ptr<Fiber> fiber) { idle_.push_back(std::move(fiber)); }

 private:
  std::vector<std::unique_ptr<Fiber>> idle_;
};

class Block {
 public:
  explicit Block(FiberPool* pool);
  ~Block();
  Block(const Block&) = delete;

  // `random` shuffles the threads, if it is not null.
  void Begin(const Launch& launch, void* const* arguments, CpuDim index, std::mt19937_64* random);

  enum class Progress { kEnded, kMoved, kWaits };
  // Each thread that can runs until it waits or ends. kWaits: all that ran wait for other memory to
  // change. Throws Failure.
  Progress RunOnce();

  void Abandon();  // gives the stacks back

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
  static Block& Of(CpuThread* cpu) { return *static_cast<Block*>(cpu->runner); }

  void Step(Thread& thread);
  bool ReleaseBarrier();
  bool ReleaseWarps();
  char* Shared(size_t bytes, size_t from_end);

  FiberPool* const pool_;
  const Launch* launch_ = nullptr;
  void* const* arguments_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<size_t> order_;
  std::vector<uint64_t[2]> lanes_;
  Thread* now_ = nullptr;
  bool paused_ = false;
  char* shared_ = nullptr;
};

}  // namespace cuda_double

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_BLOCK_H_
