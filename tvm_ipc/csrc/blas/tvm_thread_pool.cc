/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file tvm_thread_pool.cc
 * \brief The thread pool that TVM's kernels use.
 */
#include <tvm/ffi/error.h>
#include <tvm/runtime/c_backend_api.h>

#include <exception>

#include "blas/tensor_view.h"

namespace tvm::runtime::threading {
// These functions are exported, but the wheel lacks the header.
int MaxConcurrency();
int NumThreads();
}  // namespace tvm::runtime::threading

namespace tvm_ipc {
namespace {

namespace ffi = tvm::ffi;

int Count() {
  // NumThreads starts the threads and binds this one to a core, so it is called only if needed.
  return MaxTvmThreads() == 1 ? 1 : tvm::runtime::threading::NumThreads();
}

struct Launch {
  void (*body)(int, void*);
  void* data;
};

int RunTask(int task, TVMParallelGroupEnv*, void* data) {
  const Launch* launch = static_cast<const Launch*>(data);
  try {
    launch->body(task, launch->data);
    return 0;
  } catch (const std::exception& error) {
    TVMFFIErrorSetRaisedFromCStr(kind::kMemory, error.what());
    return -1;
  }
}

void RunTasks(int tasks, void (*body)(int, void*), void* data) {
  Launch launch{body, data};
  if (TVMBackendParallelLaunch(RunTask, &launch, tasks) != 0) {
    throw ffi::details::MoveFromSafeCallRaised();
  }
}

}  // namespace

const Threads kTvmThreads{Count, RunTasks};

int MaxTvmThreads() { return tvm::runtime::threading::MaxConcurrency(); }

}  // namespace tvm_ipc
