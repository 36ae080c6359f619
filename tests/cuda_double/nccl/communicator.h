/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file communicator.h
 * \brief Communicators of the double of NCCL: their members share a file in /dev/shm.
 */
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_NCCL_COMMUNICATOR_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_NCCL_COMMUNICATOR_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace nccl_double {

enum Result {
  kSuccess = 0,
  kCudaFailed = 1,
  kSystemFailed = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteFailed = 6,
  kInProgress = 7,
};

constexpr int kMostRanks = 64;
constexpr size_t kChunkBytes = 32 << 10;

/*! \brief From one member to another: two chunks, the second before the first is taken. */
struct Channel {
  std::atomic<uint64_t> written;
  std::atomic<uint64_t> taken;
  size_t bytes[2];
  unsigned char chunk[2][kChunkBytes];
};

/*! \brief What the members share. */
struct Shared {
  std::atomic<int> arrived;
  std::atomic<int> finalized;
  std::atomic<int> device[kMostRanks];  // and 1
  Channel mail[1];                      // [from][to]

  static size_t Bytes(int size) {
    return sizeof(Shared) + sizeof(Channel) * static_cast<size_t>(size) * static_cast<size_t>(size);
  }
};

}  // namespace nccl_double

/*! \brief A member's part. Never freed, so that a use after its end is seen. */
struct ncclComm {
  int size = 0;
  int rank = 0;
  int device = 0;
  bool blocking = true;
  std::string file;
  nccl_double::Shared* shared = nullptr;
  std::atomic<int> state{nccl_double::kSuccess};
  std::atomic<bool> abort{false};
  std::atomic<bool> ended{false};
  /*! \brief In seconds. */
  std::atomic<int64_t> ended_at{0};
  /*! \brief Operations that the device is in. */
  std::atomic<int> running{0};
  std::atomic<bool> connected{false};
  std::string error;

  nccl_double::Channel& mail(int from, int to) { return shared->mail[from * size + to]; }
};

namespace nccl_double {

/*! \brief Where members find each other: files `nccl_double.<who made the id>.<random>`. */
constexpr const char* kFolder = "/dev/shm";
/*! \brief Of sessions whose members were all killed before they had met. */
void RemoveFilesOfTheDead();
/*! \brief Meet the others; false if that was aborted. */
bool Join(ncclComm* communicator);

enum class Kind { kAllReduce, kReduceScatter, kReduce, kAllGather, kBroadcast, kSend, kReceive };

struct Operation {
  Kind kind;
  const unsigned char* send;
  unsigned char* recv;
  size_t count;
  int type;
  int how;
  /*! \brief Root or peer. */
  int other;
};

/*! \brief What a stream does in one go. */
struct Job {
  ncclComm* communicator;
  std::vector<Operation> operations;
  /*! \brief Whether it is in a graph, which may run it again. */
  bool captured;
};

void Run(const Job& job);

size_t WidthOf(int type);
/*! \brief to = what the sources make, from the last one on: not the order that anybody expects. */
void Reduce(int type, int how, const std::vector<const unsigned char*>& sources, size_t count,
            unsigned char* to);

}  // namespace nccl_double
#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_NCCL_COMMUNICATOR_H_
