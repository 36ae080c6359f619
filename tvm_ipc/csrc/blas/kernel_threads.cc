/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernel_threads.cc
 * \brief The threads of our kernels, and of TVM's kernels in modules that are loaded afterwards.
 *
 * A compiled module calls TVMBackendParallelLaunch through a pointer that is set when it is loaded.
 * TVM's pool binds threads to cores and waits for threads that have not started a task, so one busy
 * core delays every kernel.
 */
#include "blas/kernel_threads.h"

#include <sched.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/runtime/c_backend_api.h>

#include <atomic>
#include <cstdint>
#include <exception>

#include "core/error.h"
#include "core/thread_pool.h"

namespace tvm::runtime::threading {
// This function is exported, but the wheel lacks the header.
int MaxConcurrency();
}  // namespace tvm::runtime::threading

namespace tvm_ipc {
namespace {

namespace ffi = tvm::ffi;

void RunTasks(int threads, int tasks, void (*body)(int, void*), void* data) {
  ThreadPool::OfThread().Run(threads, tasks, body, data);
}

/*! \brief A parallel loop of a kernel of TVM. */
struct KernelLaunch {
  FTVMParallelLambda lambda;
  void* data;
  TVMParallelGroupEnv env;
  /*! \brief The number of calls of the barrier. */
  std::atomic<uint32_t> arrived{0};

  void RunTask(int task) {
    if (lambda(task, &env, data) != 0) throw ffi::details::MoveFromSafeCallRaised();
  }
};

int LaunchKernel(FTVMParallelLambda lambda, void* data, int num_task) {
  const int threads = MaxKernelThreads();
  KernelLaunch launch{lambda, data, {}};
  launch.env.sync_handle = &launch;
  launch.env.num_task = num_task == 0 ? threads : num_task;
  try {
    if (threads > 1 && launch.env.num_task > 1 &&
        ThreadPool::OfThread().TryRun(
            threads, launch.env.num_task,
            [](int task, void* of) { static_cast<KernelLaunch*>(of)->RunTask(task); }, &launch)) {
      return 0;
    }
    launch.env.num_task = 1;
    launch.RunTask(0);
    return 0;
  } catch (const ffi::Error& error) {
    ffi::details::SetSafeCallRaised(error);
  } catch (const std::exception& error) {
    TVMFFIErrorSetRaisedFromCStr(kind::kRuntime, error.what());
  }
  return -1;
}

/*! \brief Wait until each task has called this as often; a kernel with a barrier has at most as
 * many tasks as there are threads. */
int WaitAtBarrier(int, TVMParallelGroupEnv* env) {
  const uint32_t tasks = static_cast<uint32_t>(env->num_task);
  std::atomic<uint32_t>& arrived = static_cast<KernelLaunch*>(env->sync_handle)->arrived;
  const uint32_t end = (arrived.fetch_add(1, std::memory_order_acq_rel) / tasks + 1) * tasks;
  while (arrived.load(std::memory_order_acquire) < end) sched_yield();
  return 0;
}

}  // namespace

const Threads kKernelThreads{MaxKernelThreads, RunTasks};

int MaxKernelThreads() { return tvm::runtime::threading::MaxConcurrency(); }

void ReplaceThreadsOfTvm() {
  TVMFFIEnvModRegisterContextSymbol("__TVMBackendParallelLaunch",
                                    reinterpret_cast<void*>(LaunchKernel));
  TVMFFIEnvModRegisterContextSymbol("__TVMBackendParallelBarrier",
                                    reinterpret_cast<void*>(WaitAtBarrier));
}

}  // namespace tvm_ipc
