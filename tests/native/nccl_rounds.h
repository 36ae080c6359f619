/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file nccl_rounds.h
 * \brief What ranks over NCCL do in a round that ends well, and what they ask of the doubles for
 * it.
 */
#ifndef TVM_IPC_TESTS_NCCL_ROUNDS_H_
#define TVM_IPC_TESTS_NCCL_ROUNDS_H_

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/communication_backend.h"
#include "core/rank_runtime_state.h"
#include "expect.h"

namespace tvm_ipc {

constexpr ElementType kFloat32{2, 32, 1};
constexpr ElementType kInt32{0, 32, 1};
constexpr size_t kCounts[] = {0, 1, 3, 36, 1025, 40000};

/*! \brief A function of one of the doubles, which have been loaded. */
template <typename Function>
Function Find(const char* library, const char* name) {
  void* file = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  EXPECT(file != nullptr, library, " has not been loaded");
  void* symbol = dlsym(file, name);
  EXPECT(symbol != nullptr, "no function ", name);
  return reinterpret_cast<Function>(symbol);
}

template <typename... Args>
void Drive(const char* name, Args... args) {
  const int status = Find<int (*)(Args...)>("libcuda.so.1", name)(args...);
  EXPECT(status == 0, name, " returned ", status);
}

/*! \brief Something that the rank's stream does not get past until it is let go. */
class Gate {
 public:
  explicit Gate(void* stream = nullptr) : open_(std::make_shared<std::atomic<bool>>(false)) {
    using Wait = void (*)(void*);
    Drive<void*, Wait, void*>(
        "cuLaunchHostFunc", stream,
        [](void* data) {
          auto* open = static_cast<std::shared_ptr<std::atomic<bool>>*>(data);
          while (!**open) usleep(500);
          delete open;
        },
        new std::shared_ptr<std::atomic<bool>>(open_));
  }
  ~Gate() { *open_ = true; }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

 private:
  std::shared_ptr<std::atomic<bool>> open_;
};

/*! \brief A team, seen by a rank in it. */
struct Members {
  TeamId id;
  std::vector<int> ranks;
  size_t me;

  size_t size() const { return ranks.size(); }
};

Members World(const Rank& rank);

/*! \brief Every collective of one type and size in a team. */
void DoAll(Rank& rank, const Members& team, ElementType type, size_t count, uint64_t seed);
/*! \brief SplitCounts of every size, none at all among them. */
void DoUnequalParts(Rank& rank, const Members& team, uint64_t seed);
/*! \brief Teams that overlap, which the ranks make and use in orders of their own. */
void DoTeams(Rank& rank, uint64_t seed);
void DoMessages(Rank& rank, uint64_t seed);
void SumWorld(Rank& rank);
/*! \brief One after the other on two streams, without anybody who waits. */
void DoTwoStreams(Rank& rank);
/*!
 * \brief Operations in a graph, which is launched an odd number of times.
 * \param stuck Whether rank 0 fails instead of launching it.
 */
void DoGraphs(Rank& rank, bool stuck);

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_NCCL_ROUNDS_H_
