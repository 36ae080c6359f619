/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file thread_signals.h
 * \brief Threads without signals, and watching other processes.
 */
#ifndef TVM_IPC_CORE_THREAD_SIGNALS_H_
#define TVM_IPC_CORE_THREAD_SIGNALS_H_

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/file_descriptor_and_memory_file.h"

namespace tvm_ipc {

/*! \brief Open a descriptor that is readable once a process has ended; -1 if unsupported. */
inline int OpenProcess(int pid) {
#ifdef SYS_pidfd_open
  return AboveStandardStreams(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
#else
  return -1;
#endif
}

/*!
 * \brief While it lives, new threads start with all signals blocked, so that the program's own
 *        threads handle them.
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

/*!
 * \brief While it lives, writes of this thread to a pipe or socket without a reader fail with
 *        EPIPE, even if the program left or set the action of SIGPIPE to its default.
 *
 * Disco calls write() and send() without MSG_NOSIGNAL. The action of a signal is the program's and
 * is the same in all threads, so it stays as it is. Do not start processes or threads while it
 * lives: they would inherit the blocked signal.
 */
class BlockSigpipe {
 public:
  BlockSigpipe() {
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
    if (sigismember(&before_, SIGPIPE)) {  // else none can be pending
      sigset_t pending;
      sigpending(&pending);
      was_pending_ = sigismember(&pending, SIGPIPE);
    }
  }
  ~BlockSigpipe() {
    const timespec no_time{};
    while (!was_pending_ && sigtimedwait(&sigpipe_, nullptr, &no_time) < 0 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockSigpipe(const BlockSigpipe&) = delete;

 private:
  sigset_t sigpipe_;
  sigset_t before_;
  bool was_pending_ = false;
};

/*! \brief Start a thread with all signals blocked; throw an error that names `what` on failure. */
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
#endif  // TVM_IPC_CORE_THREAD_SIGNALS_H_
