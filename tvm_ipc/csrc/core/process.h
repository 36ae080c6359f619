/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file process.h
 * \brief Threads that leave signals to the program, and the ends of other processes.
 */
#ifndef TVM_IPC_CORE_PROCESS_H_
#define TVM_IPC_CORE_PROCESS_H_

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"

namespace tvm_ipc {

/*! \brief A file that is readable once the process has ended; -1 where there is no such thing. */
inline int OpenProcess(int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  return -1;
#endif
}

/*!
 * \brief While it lives, a new thread starts without signals: they belong to the program's own
 *        threads, which know how to go on after them.
 */
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

/*! \brief A new thread without signals, or an error that says what could not be started. */
template <typename Function>
std::thread StartThread(const char* what, Function function) {
  BlockSignals blocked;
  try {
    return std::thread(std::move(function));
  } catch (const std::system_error& error) {
    Fail(kind::kRuntime, "cannot start the thread of ", what, ": ", error.what(),
         "; a higher limit of processes helps (RLIMIT_NPROC, pids.max of the container)");
  }
}

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_PROCESS_H_
