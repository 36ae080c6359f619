/* SPDX-License-Identifier: Apache-2.0 */
/*! \file worker_pipes.cc */
#include "disco/worker_pipes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <tvm/ffi/optional.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/atfork_descriptors.h"
#include "core/error.h"
#include "disco/error_conversion.h"

namespace tvm_ipc {
namespace {

namespace ffi = tvm::ffi;

/*! \brief Each Ctrl-C can end one attempt. */
constexpr int kMostAttempts = 5;

class WorkerPipes {
 public:
  WorkerPipes(int null_device, const ffi::Shape& descriptors) : null_device_(null_device) {
    for (size_t i = 0; i + 1 < descriptors.size(); i += 2) {
      pipes_.push_back({static_cast<int>(descriptors[i]), static_cast<int>(descriptors[i + 1])});
    }
  }

  ffi::Shape Of(int64_t worker) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (worker < 1 || worker > static_cast<int64_t>(pipes_.size())) {
      Fail(kind::kValue, "there are pipes to the workers 1 to ", pipes_.size(), ", and not to ",
           worker);
    }
    const Pipe& pipe = pipes_[static_cast<size_t>(worker - 1)];
    return ffi::Shape{pipe.read, pipe.write};
  }

  bool HungUp() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<pollfd> polled;
    for (const Pipe& pipe : pipes_) polled.push_back({pipe.write, POLLRDHUP, 0});
    return poll(polled.data(), polled.size(), 0) > 0;  // also for POLLERR and POLLHUP
  }

  void Mute() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (null_device_ < 0) return;
    for (const Pipe& pipe : pipes_) {
      const int connection = fcntl(pipe.write, F_DUPFD_CLOEXEC, 0);
      dup3(null_device_, pipe.write, O_CLOEXEC);
      if (connection < 0) continue;     // out of descriptors; it was closed
      shutdown(connection, SHUT_RDWR);  // also for duplicates in other processes
      close(connection);
    }
    close(std::exchange(null_device_, -1));
  }

  void Close() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Pipe& pipe : pipes_) {
      CloseKept(pipe.write);
      if (pipe.read != pipe.write) CloseKept(pipe.read);
    }
    pipes_.clear();
    if (null_device_ >= 0) close(std::exchange(null_device_, -1));
  }

 private:
  struct Pipe {
    int read, write;
  };
  std::mutex mutex_;
  int null_device_;  // -1 once the pipes are muted or closed
  std::vector<Pipe> pipes_;
};

/*! \brief The pipes of the sessions of this process. */
struct Pools {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<WorkerPipes>> by_key;

  static Pools& Global() {
    static auto* const pools = new Pools();  // sessions may end after static objects are destroyed
    return *pools;
  }

  std::shared_ptr<WorkerPipes> Find(const std::string& key) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = by_key.find(key);
    return found == by_key.end() ? nullptr : found->second;
  }
};

/*! \brief Return whether SIGINT has a handler, so that it does not end the program. */
bool HandlesSigint() {
  struct sigaction now;
  return sigaction(SIGINT, nullptr, &now) == 0 && now.sa_handler != SIG_DFL;
}

}  // namespace

void OfferPipes(std::string key, int64_t null_device, ffi::Shape descriptors) {
  auto pipes = std::make_shared<WorkerPipes>(static_cast<int>(null_device), descriptors);
  Pools& pools = Pools::Global();
  std::lock_guard<std::mutex> lock(pools.mutex);
  pools.by_key[key] = std::move(pipes);
}

ffi::Function CreateProcessPool(int64_t, int64_t, std::string key) {
  auto pipes = Pools::Global().Find(key);
  if (pipes == nullptr) Fail(kind::kValue, "there are no workers with the key ", key);
  return ffi::Function::FromTyped([key, pipes](int64_t worker) -> ffi::Optional<ffi::Shape> {
    if (worker != 0) return WithErrors([&] { return pipes->Of(worker); });
    ClosePipes(key);
    return std::nullopt;
  });
}

bool PipesHungUp(std::string key) {
  const auto pipes = Pools::Global().Find(key);
  return pipes != nullptr && pipes->HungUp();
}

void MutePipes(std::string key) {
  if (const auto pipes = Pools::Global().Find(key)) pipes->Mute();
}

bool ClosePipes(std::string key) {
  Pools& pools = Pools::Global();
  std::unique_lock<std::mutex> lock(pools.mutex);
  auto closed = pools.by_key.extract(key);
  lock.unlock();
  if (closed.empty()) return false;
  closed.mapped()->Close();
  return true;
}

ffi::Function RetryInDestructor(ffi::Function pool) {
  return ffi::Function::FromTyped([pool](int64_t worker) -> ffi::Any {
    if (worker != 0) return pool(worker);
    bool interrupted = false;
    for (int attempt = 1; attempt <= kMostAttempts; ++attempt) {
      try {
        pool(worker);
        break;
      } catch (const ffi::Error& error) {
        interrupted = interrupted || error.kind() == "KeyboardInterrupt";
        if (attempt < kMostAttempts) continue;
        std::fprintf(stderr, "tvm_ipc: a session of Disco could not end its workers: %s\n",
                     error.what());
      }
    }
    if (interrupted && HandlesSigint()) raise(SIGINT);
    return nullptr;
  });
}

}  // namespace tvm_ipc
