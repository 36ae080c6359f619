/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file cuda_ranks.h
 * \brief Ranks that run the CUDA kernels on the CPU: a thread of the system for each CUDA thread,
 *        so that ThreadSanitizer sees what they do to each other's memory.
 */
#ifndef TVM_IPC_TESTS_CUDA_RANKS_H_
#define TVM_IPC_TESTS_CUDA_RANKS_H_

#include <dlfcn.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../cuda_double/kernel_abi.h"
#include "cuda/kernels/choose_kernel_and_grid.h"
#include "expect.h"

namespace tvm_ipc {
namespace kernels {

/*! \brief Whether all takes ten times as long, so that less has to do. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

/*! \brief There are more threads than cores, and those that wait should leave these to others. */
inline void YieldOrSleep(uint32_t turn) {
  if (turn % 4 == 3) {
    usleep(20);
  } else {
    sched_yield();
  }
}

/*! \brief All threads of a block wait for each other. */
class BlockBarrier {
 public:
  explicit BlockBarrier(uint32_t threads) : threads_(threads) {}
  void Wait() {
    const uint32_t turn = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.fetch_add(1, std::memory_order_release);
      return;
    }
    for (uint32_t i = 0; turn_.load(std::memory_order_acquire) == turn; ++i) YieldOrSleep(i);
  }

 private:
  const uint32_t threads_;
  std::atomic<uint32_t> arrived_{0};
  std::atomic<uint32_t> turn_{0};
};

/*! \brief A stream of a device: what it launches runs to its end before the next. */
class Stream {
 public:
  Stream() = default;
  ~Stream() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }
  Stream(const Stream&) = delete;

  /*! \brief From now on threads dawdle now and then, up to so many microseconds. */
  void Dawdle(uint32_t microseconds) { dawdle_ = microseconds; }

  template <typename Args>
  void Launch(const std::string& name, const Args& args, kernels::Launch size = {1, 1, 1}) {
    const auto* kernel =
        static_cast<const CpuKernel*>(dlsym(RTLD_DEFAULT, ("tvm_ipc_cpu_kernel_" + name).c_str()));
    EXPECT(kernel != nullptr, "there is no kernel ", name);
    EXPECT(kernel->abi == kCpuKernelAbi && kernel->parameters == 1, name);
    EXPECT(kernel->sizes[0] == sizeof(Args), name);
    const Args copy = args;  // as a launch does
    kernel_ = kernel;
    arguments_[0] = const_cast<Args*>(&copy);
    blocks_ = size.blocks;
    threads_ = size.threads;
    barriers_.clear();
    shared_.clear();
    for (uint32_t block = 0; block < blocks_; ++block) {
      barriers_.push_back(std::make_unique<BlockBarrier>(threads_));
      shared_.emplace_back((kernel->static_shared + 15) / 16 * 2, ~0ull);
    }
    const uint32_t all = blocks_ * threads_;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (helpers_.size() + 1 < all) {
        const uint32_t number = static_cast<uint32_t>(helpers_.size()) + 1;
        helpers_.emplace_back([this, number, seen = launch_] { Help(number, seen); });
      }
      running_ = all - 1;
      wanted_ = all;
      ++launch_;
    }
    if (all > 1) changed_.notify_all();
    RunThread(0);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  struct Running : CpuThread {
    BlockBarrier* block_barrier;
    uint32_t dawdle;
    uint32_t state;
    uint32_t turn;
    void Dawdle() {
      if (dawdle == 0) return;
      state = state * 1664525u + 1013904223u;
      if (state >> 28 == 0) usleep((state >> 8) % dawdle);
    }
  };

  void Help(uint32_t number, uint64_t seen) {
    while (true) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return ended_ || launch_ != seen; });
        if (ended_) return;
        seen = launch_;
        if (number >= wanted_) continue;
      }
      RunThread(number);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--running_ == 0) changed_.notify_all();
    }
  }

  void RunThread(uint32_t number) {
    Running me{};
    const uint32_t block = number / threads_;
    me.thread = {number % threads_, 0, 0};
    me.block = {block, 0, 0};
    me.block_size = {threads_, 1, 1};
    me.grid = {blocks_, 1, 1};
    me.static_shared = shared_[block].data();
    me.block_barrier = barriers_[block].get();
    me.dawdle = dawdle_;
    me.state = static_cast<uint32_t>(launch_ * 7919 + number * 104729 +
                                     reinterpret_cast<uintptr_t>(this) / 64);
    me.barrier = [](CpuThread* thread) {
      auto* running = static_cast<Running*>(thread);
      running->Dawdle();
      running->block_barrier->Wait();
      running->Dawdle();
    };
    me.pause = [](CpuThread* thread) {
      auto* running = static_cast<Running*>(thread);
      running->Dawdle();
      YieldOrSleep(running->turn++);
    };
    kernel_->run(&me, arguments_);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::thread> helpers_;
  uint64_t launch_ = 0;
  uint32_t wanted_ = 0;
  uint32_t running_ = 0;
  bool ended_ = false;
  uint32_t dawdle_ = 0;

  const CpuKernel* kernel_ = nullptr;
  void* arguments_[1];
  uint32_t blocks_ = 0;
  uint32_t threads_ = 0;
  std::vector<std::unique_ptr<BlockBarrier>> barriers_;
  std::vector<std::vector<uint64_t>> shared_;
};

/*! \brief Most of it is never touched, so nothing is written: ThreadSanitizer would take half a
 *         minute for that. AddressSanitizer watches the ends of what is on the heap.
 */
template <typename T>
std::shared_ptr<T> ZeroedMemory(size_t bytes = sizeof(T)) {
  const size_t whole = (bytes + 4095) / 4096 * 4096;
#ifdef __SANITIZE_ADDRESS__
  void* memory = std::aligned_alloc(4096, whole);
  std::memset(memory, 0, whole);
  return {static_cast<T*>(memory), [](T* p) { std::free(p); }};
#else
  void* memory = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT(memory != MAP_FAILED);
  return {static_cast<T*>(memory), [whole](T* p) { munmap(p, whole); }};
#endif
}

/*! \brief The members of a team, and memory of each that all read. */
class Members {
 public:
  static constexpr size_t kRegionBytes = 24 << 20;
  /*! \brief Where the half of a region begins that is scratch. */
  static constexpr size_t kScratch = kRegionBytes * 3 / 4;

  explicit Members(int size, double seconds = 60) : size_(size), seconds_(seconds) {
    for (int place = 0; place < size; ++place) {
      team_slots_.push_back(ZeroedMemory<TeamSlotMemory>());
      regions_.push_back(ZeroedMemory<uint8_t>(kRegionBytes));
      channels_.push_back(ZeroedMemory<ChannelMemory>());
      errors_.push_back(ZeroedMemory<ErrorRecord>());
    }
  }

  int size() const { return size_; }
  TeamSlotMemory& team_slot(int place) { return *team_slots_[place]; }
  uint8_t* region(int place) { return regions_[place].get(); }
  ChannelMemory& channels(int place) { return *channels_[place]; }
  ErrorRecord& error(int place) { return *errors_[place]; }
  std::atomic<uint32_t>& abort() { return abort_; }

  TeamArgs Args(int place) {
    TeamArgs args{};
    args.size = size_;
    args.place = place;
    for (int i = 0; i < size_; ++i) {
      args.team_slot[i] = team_slots_[i].get();
      args.region[i] = regions_[i].get();
    }
    args.guard = GuardOf(place, &team_slots_[place]->failed);
    return args;
  }
  Guard GuardOf(int place, uint32_t* failed) {
    return {static_cast<uint64_t>(seconds_ * 1e9), reinterpret_cast<const uint32_t*>(&abort_),
            failed, errors_[place].get()};
  }

  /*! \brief What the host does after an error, with no kernel running. */
  void Zero() {
    for (int place = 0; place < size_; ++place) {
      std::memset(static_cast<void*>(team_slots_[place].get()), 0, sizeof(TeamSlotMemory));
      std::memset(static_cast<void*>(channels_[place].get()), 0, sizeof(ChannelMemory));
      std::memset(static_cast<void*>(errors_[place].get()), 0, sizeof(ErrorRecord));
    }
    abort_ = 0;
  }

  /*! \brief Every rank does something, each in a thread and with a stream of its own. */
  void Run(const std::function<void(int place, Stream& stream)>& body, uint32_t dawdle = 0) {
    std::vector<std::thread> threads;
    for (int place = 0; place < size_; ++place) {
      threads.emplace_back([&, place] {
        Stream stream;
        stream.Dawdle(dawdle);
        body(place, stream);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void ExpectNoError() {
    for (int place = 0; place < size_; ++place) {
      EXPECT(error(place).code == kNoError, "member ", place, " of ", size_, ": code ",
             error(place).code, " in phase ", error(place).phase, " of epoch ", error(place).epoch,
             ", member ", error(place).member);
    }
  }

 private:
  int size_;
  double seconds_;
  std::vector<std::shared_ptr<TeamSlotMemory>> team_slots_;
  std::vector<std::shared_ptr<uint8_t>> regions_;
  std::vector<std::shared_ptr<ChannelMemory>> channels_;
  std::vector<std::shared_ptr<ErrorRecord>> errors_;
  std::atomic<uint32_t> abort_{0};
};

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_CUDA_RANKS_H_
