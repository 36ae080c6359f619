/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file thread_pool.h
 * \brief Threads that share the tasks of parallel loops with the thread that calls.
 *
 * The caller and its helper threads claim one task after another. The caller waits only for tasks
 * that were claimed, so a helper whose core another program uses delays nothing before it has a
 * task. Threads are not bound to cores: the kernel moves a helper away from a busy core. A thread
 * that waits spins for some microseconds and then sleeps, which frees its core.
 */
#ifndef TVM_IPC_CORE_THREAD_POOL_H_
#define TVM_IPC_CORE_THREAD_POOL_H_

#include <sched.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>

namespace tvm_ipc {

class ThreadPool : public std::enable_shared_from_this<ThreadPool> {
 public:
  using Body = void (*)(int task, void* data);

  /*!
   * \brief Return the pool of the calling thread: several threads that call do not share helpers.
   *        It starts helpers when they are first needed, and they end with the thread.
   */
  static ThreadPool& OfThread();

  /*!
   * \brief Call `body(task, data)` for each task, on this thread and up to `threads` - 1 helpers,
   *        and return true when all calls have returned. Rethrows the first exception of a task.
   *
   * Return false, without a call, in a task of a pool, and while helpers are delayed: run all tasks
   * on this thread then. With at most `threads` tasks, each one that waits for the others runs on a
   * thread of its own.
   */
  bool TryRun(int threads, int tasks, Body body, void* data);

  /*! \brief Like `TryRun`, but run all tasks on this thread where that returns false. */
  void Run(int threads, int tasks, Body body, void* data);

 private:
  using Clock = std::chrono::steady_clock;
  struct Owner;
  /*! \brief A thread, and where it may run, which is limited while it wakes up. */
  struct Helper {
    pid_t thread = 0;
    cpu_set_t cores;
    std::atomic<bool> sleeps{false};
    std::atomic<bool> is_limited{false};
  };

  void StartHelpers(int helpers);
  void Help(int index, Helper* helper);
  /*! \brief Return when `launches_` is not `seen`, or earlier. */
  void AwaitLaunch(uint32_t seen, Helper* helper);
  /*!
   * \brief Make helpers that sleep wake up on other cores than the caller's. The kernel would not
   *        know that the caller keeps its core, and would move the helper after milliseconds.
   */
  void KeepFromOwnCore();
  /*! \brief Run tasks until none is left; return how many. */
  uint32_t RunTasks();
  bool Claim(uint32_t* task);
  void WaitForHelpers(uint32_t tasks);
  /*! \brief Learn from a launch whether other programs use the cores of the helpers. */
  void Learn(Clock::duration each_task, Clock::duration waited, Clock::time_point now);

  std::deque<Helper> helpers_;
  // The tasks; written before they are offered, and read by those who claimed one.
  Body body_ = nullptr;
  void* data_ = nullptr;
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
  /*! \brief Until when the caller runs tasks alone, and for how long it last did. */
  Clock::time_point alone_until_{};
  Clock::duration alone_for_{0};
  /*! \brief The number of tasks in the upper half, and the next one in the lower half. */
  alignas(64) std::atomic<uint64_t> offer_{0};
  /*! \brief Helpers with a lower index may claim tasks. */
  std::atomic<int> allowed_{0};
  std::atomic<bool> closed_{false};
  /*! \brief Whether helpers were not delayed recently. */
  std::atomic<bool> calm_{true};
  /*! \brief Changes with each launch; helpers wait for it. */
  alignas(64) std::atomic<uint32_t> launches_{0};
  std::atomic<uint32_t> idle_sleepers_{0};
  /*! \brief The number of tasks that helpers have done; the caller waits for it. */
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<uint32_t> caller_sleeps_{0};
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_THREAD_POOL_H_
