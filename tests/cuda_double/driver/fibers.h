// SPDX-License-Identifier: Apache-2.0
// Code of the device runs on fibers of a stream's thread: so a thread of a block can wait for the
// others, and a fault (memory that is not there) ends the operation and not the process.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_FIBERS_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_FIBERS_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace cuda_double {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;

  // Begins `body` at the next Resume.
  void Begin(std::function<void()> body);
  // Runs until the body yields or ends; false if it touched memory that is not there.
  bool Resume();
  bool ended() const { return ended_; }
  // Of the fiber that runs in this thread: back to whoever resumed it.
  static void Yield();
  // The address at which this thread's last fault happened.
  static void* FaultAddress();

 private:
  static void Enter();
  char* stack_ = nullptr;
  void* pointer_ = nullptr;
  bool ended_ = true;
  std::function<void()> body_;
};

// Each thread that resumes fibers calls it once: faults on them are caught from then on.
void CatchFaults();

}  // namespace cuda_double

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_FIBERS_H_
