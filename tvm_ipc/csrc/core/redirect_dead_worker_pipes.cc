/* SPDX-License-Identifier: Apache-2.0 */
/*! \file redirect_dead_worker_pipes.cc */
#include "core/redirect_dead_worker_pipes.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "core/atfork_descriptors.h"
#include "core/file_descriptor_and_memory_file.h"
#include "core/thread_signals.h"

namespace tvm_ipc {

namespace {

/*! \brief The interval of checks for ended workers if the system has no pidfd. */
constexpr int kLookMs = 100;

struct Pipe {
  int pid = 0;
  int process = -1;  // pidfd; -1 if the system has none
  int reading_end = -1;
  int reply = -1;
  bool ended = false;
};

/*! \brief Return whether the child has ended, without reaping it: its parent may still do that. */
bool Ended(int pid) {
  siginfo_t info{};
  const int got = waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT);
  return got != 0 || info.si_pid != 0;
}

/*! \brief The watching thread and its pipes. A process has one, from its first pipe on. */
class Watch {
 public:
  Watch() {
    nowhere_ = AboveStandardStreams(open("/dev/null", O_WRONLY | O_CLOEXEC));
    wake_ = AboveStandardStreams(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (nowhere_ < 0 || wake_ < 0) {
      const int error = errno;
      if (nowhere_ >= 0) close(nowhere_);
      Fail(kind::kRuntime, "cannot watch worker processes: ", strerror(error), FilesHint(error));
    }
    StartThread("the watch over worker processes", [this] { Run(); }).detach();
  }

  void Add(int pid, int reading_end, int writing_end, int reply) {
    std::lock_guard<std::mutex> lock(mutex_);
    pipes_[writing_end] = Pipe{pid, OpenProcess(pid), reading_end, reply, false};
    KeepFromChildren(writing_end);
    KeepFromChildren(reading_end);
    Wake();
  }

  void Remove(int writing_end) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = pipes_.find(writing_end);
    if (found == pipes_.end()) return;
    CloseKept(writing_end);
    CloseKept(found->second.reading_end);
    CloseKept(found->second.reply);
    if (found->second.process >= 0) close(found->second.process);
    pipes_.erase(found);
    Wake();
  }

 private:
  void Wake() {
    const uint64_t one = 1;
    if (write(wake_, &one, sizeof(one)) < 0) {
    }
  }

  void Run() {
    std::vector<pollfd> polled;
    while (true) {
      int patience = -1;
      polled.assign(1, {wake_, POLLIN, 0});
      {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& [writing_end, pipe] : pipes_) {
          if (pipe.ended && pipe.reading_end >= 0) polled.push_back({pipe.reading_end, POLLIN, 0});
          if (!pipe.ended && pipe.process >= 0) polled.push_back({pipe.process, POLLIN, 0});
          if (!pipe.ended && pipe.process < 0) patience = kLookMs;
        }
      }
      if (poll(polled.data(), polled.size(), patience) < 0) continue;
      uint64_t count;
      if (read(wake_, &count, sizeof(count)) < 0) {
      }
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [writing_end, pipe] : pipes_) {
        if (!pipe.ended && Ended(pipe.pid)) {
          pipe.ended = true;
          dup3(nowhere_, writing_end, O_CLOEXEC);
        }
        if (pipe.ended && pipe.reading_end >= 0) Drain(&pipe);
      }
    }
  }

  /*! \brief Discard what is in the pipe; close it once all its writing ends are closed. */
  static void Drain(Pipe* pipe) {
    char bytes[4096];
    pollfd polled{pipe->reading_end, POLLIN, 0};
    while (poll(&polled, 1, 0) > 0) {
      if (read(pipe->reading_end, bytes, sizeof(bytes)) > 0) continue;
      CloseKept(pipe->reading_end);
      pipe->reading_end = -1;
      return;
    }
  }

  int nowhere_ = -1;
  int wake_ = -1;
  std::mutex mutex_;
  std::map<int, Pipe> pipes_;  // by writing end
};

Watch& TheWatch() {
  // Never destroyed, because sessions may end after static objects are destroyed. A forked process
  // does not have the thread and creates its own watch.
  static std::mutex mutex;
  static std::map<uint32_t, Watch*> watches;
  std::lock_guard<std::mutex> lock(mutex);
  Watch*& watch = watches[Generation()];
  if (watch == nullptr) watch = new Watch();
  return *watch;
}

}  // namespace

void WatchPipe(int pid, int reading_end, int writing_end, int reply) {
  TheWatch().Add(pid, reading_end, writing_end, reply);
}

void ClosePipe(int writing_end) { TheWatch().Remove(writing_end); }

}  // namespace tvm_ipc
