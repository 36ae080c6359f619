/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file nccl.cc
 * \brief A double of libnccl.so.2, for machines without a GPU.
 *
 * It knows nothing of the double of the driver but the driver's own interface: what it enqueues is
 * a host function on a stream, which moves data between memory of this process and mailboxes in a
 * file that the members share. It does what NCCL does where it matters to those who call it: calls
 * that return before anything is done, communicators that are "in progress", groups, calls and
 * kernels that wait for ever for a peer that does not come, and an abort that ends them. Where NCCL
 * would write beyond a buffer or crash, it says so and ends the process.
 *
 * NCCL_DOUBLE_FAIL=ncclAllReduce:2:5 lets the second call of a function return 5; likewise
 * ncclDoubleFail of this library. The result "10 + r" is one that NCCL finds out later.
 */
#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "communicator.h"

using namespace nccl_double;  // NOLINT: this file is its face

namespace {

constexpr int kVersion = 22807;

struct UniqueId {
  char bytes[128];
};
struct Config {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};
using Stream = struct CUstream_st*;
using HostFunction = void (*)(void*);

/*! \brief A function of the driver, double or not. */
template <typename Function>
Function Driver(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  void* symbol = library == nullptr ? nullptr : dlsym(library, name);
  if (symbol == nullptr) {
    std::fprintf(stderr, "the double of NCCL: the driver has no %s\n", name);
    std::abort();
  }
  return reinterpret_cast<Function>(symbol);
}

thread_local std::string last_error;

int Refuse(int result, const std::string& why) {
  last_error = why;
  return result;
}

/*! \brief Which calls are to fail, and how often each was made. */
class Faults {
 public:
  static Faults& All() {
    static auto* faults = new Faults();
    return *faults;
  }
  void Add(const std::string& call, int number, int result) {
    std::lock_guard<std::mutex> lock(mutex_);
    planned_[call] = {number, result};
  }
  /*! \brief What this call is to return. */
  int Take(const std::string& call) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++calls_[call];
    const auto found = planned_.find(call);
    if (found == planned_.end() || --found->second.first > 0) return kSuccess;
    const int result = found->second.second;
    planned_.erase(found);
    return result;
  }
  int calls(const std::string& call) {
    std::lock_guard<std::mutex> lock(mutex_);
    return calls_[call];
  }

 private:
  Faults() {
    const char* text = getenv("NCCL_DOUBLE_FAIL");
    char call[64];
    int number = 0;
    int result = 0;
    if (text != nullptr && sscanf(text, "%63[^:]:%d:%d", call, &number, &result) == 3) {
      planned_[call] = {number, result};
    }
  }
  std::mutex mutex_;
  std::map<std::string, std::pair<int, int>> planned_;
  std::map<std::string, int> calls_;
};

/*! \brief The operations of the calling thread's group. */
struct Group {
  int depth = 0;
  std::map<std::pair<ncclComm*, Stream>, Job> jobs;
  /*! \brief What went wrong in one of its calls, which its end returns. */
  int worst = kSuccess;
};
thread_local Group group;

bool Usable(ncclComm* communicator) {
  if (communicator == nullptr) return false;
  if (!communicator->ended) return true;
  std::fprintf(stderr, "the double of NCCL: a communicator is used after its end\n");
  std::abort();
}

void Launch(Stream stream, Job job) {
  auto* kept = new Job(std::move(job));
  const auto launch = Driver<int (*)(Stream, HostFunction, void*)>("cuLaunchHostFunc");
  const int status = launch(
      stream,
      [](void* data) {
        auto* job = static_cast<Job*>(data);
        Run(*job);
        if (!job->captured) delete job;
      },
      kept);
  if (status == 0) return;
  kept->communicator->error = "Cuda failure " + std::to_string(status);
  kept->communicator->state = kCudaFailed;
}

bool Capturing(Stream stream) {
  int state = 0;
  Driver<int (*)(Stream, int*)>("cuStreamIsCapturing")(stream, &state);
  return state != 0;
}

int EndGroup() {
  if (--group.depth > 0) return kSuccess;
  auto jobs = std::exchange(group.jobs, {});
  const int worst = std::exchange(group.worst, kSuccess);
  if (worst != kSuccess) return worst;
  bool later = false;
  for (auto& [where, job] : jobs) {
    auto [communicator, stream] = where;
    job.captured = Capturing(stream);
    if (job.captured || communicator->blocking || communicator->connected.exchange(true)) {
      Launch(stream, std::move(job));
      if (communicator->state != kSuccess) return communicator->state;
      continue;
    }
    // The first time it connects the members, which takes its time.
    communicator->state = kInProgress;
    later = true;
    using Context = struct CUctx_st*;
    Context context = nullptr;
    Driver<int (*)(Context*)>("cuCtxGetCurrent")(&context);
    std::thread([context, stream = stream, job = std::move(job)]() mutable {
      Driver<int (*)(Context)>("cuCtxPushCurrent_v2")(context);
      usleep(2000);
      ncclComm* communicator = job.communicator;
      if (!communicator->abort) Launch(stream, std::move(job));
      int connecting = kInProgress;
      communicator->state.compare_exchange_strong(connecting, kSuccess);
    }).detach();
  }
  return later ? kInProgress : kSuccess;
}

int Enqueue(const char* call, const Operation& operation, ncclComm* communicator, Stream stream) {
  if (!Usable(communicator)) return Refuse(kInvalidArgument, std::string(call) + " : no comm");
  const bool has_root = operation.kind == Kind::kReduce || operation.kind == Kind::kBroadcast ||
                        operation.kind == Kind::kSend || operation.kind == Kind::kReceive;
  int result = Faults::All().Take(call);
  if (result >= 10) {  // found out when the operation is on its way
    communicator->error = "a wire was cut";
    communicator->state = result - 10;
    result = kSuccess;
    return result;
  }
  if (result != kSuccess) {
    Refuse(result, std::string(call) + " was told to fail");
  } else if (communicator->state == kInProgress) {
    result = Refuse(kInvalidArgument, "Attempt to use communicator before it is ready");
  } else if (operation.type < 0 || operation.type > 9 || operation.how < 0 || operation.how > 4) {
    result = Refuse(kInvalidArgument, std::string(call) + " : invalid type or operator");
  } else if (has_root && (operation.other < 0 || operation.other >= communicator->size)) {
    result = Refuse(kInvalidArgument, std::string(call) + " : invalid root or peer");
  }
  if (group.depth > 0) group.worst = group.worst == kSuccess ? result : group.worst;
  if (result != kSuccess) return result;
  ++group.depth;
  Job& job = group.jobs[{communicator, stream}];
  job.communicator = communicator;
  if (operation.count > 0) job.operations.push_back(operation);
  return EndGroup();
}

const unsigned char* From(const void* data) { return static_cast<const unsigned char*>(data); }
unsigned char* To(void* data) { return static_cast<unsigned char*>(data); }

}  // namespace

#define NCCL_DOUBLE extern "C" __attribute__((visibility("default")))

/*! \brief For tests: the so-manieth call from now on returns this. */
NCCL_DOUBLE void ncclDoubleFail(const char* call, int number, int result) {
  Faults::All().Add(call, number, result);
}
/*! \brief For tests: how often this process called a function. */
NCCL_DOUBLE int ncclDoubleCalls(const char* call) { return Faults::All().calls(call); }

NCCL_DOUBLE int ncclGetVersion(int* version) {
  const char* given = getenv("NCCL_DOUBLE_VERSION");
  *version = given == nullptr ? kVersion : atoi(given);
  return kSuccess;
}

NCCL_DOUBLE const char* ncclGetErrorString(int result) {
  static const char* const kTexts[] = {"no error",
                                       "unhandled cuda error",
                                       "unhandled system error",
                                       "internal error",
                                       "invalid argument",
                                       "invalid usage",
                                       "remote process exited or there was a network error",
                                       "NCCL operation in progress"};
  return result >= 0 && result <= 7 ? kTexts[result] : "unknown result code";
}

NCCL_DOUBLE const char* ncclGetLastError(ncclComm* communicator) {
  if (communicator != nullptr && !communicator->error.empty()) return communicator->error.c_str();
  return last_error.c_str();
}

NCCL_DOUBLE int ncclGetUniqueId(UniqueId* id) {
  if (const int result = Faults::All().Take("ncclGetUniqueId")) {
    return Refuse(result, "no socket interface found");
  }
  RemoveFilesOfTheDead();
  static std::random_device random;
  memset(id->bytes, 0, sizeof(id->bytes));
  snprintf(id->bytes, sizeof(id->bytes), "%s/nccl_double.%d.%08x%08x", kFolder, getpid(), random(),
           random());
  return kSuccess;
}

NCCL_DOUBLE int ncclCommInitRankConfig(ncclComm** handle, int size, UniqueId id, int rank,
                                       Config* config) {
  *handle = nullptr;
  if (const int result = Faults::All().Take("ncclCommInitRankConfig")) {
    return Refuse(result, "ncclCommInitRankConfig was told to fail");
  }
  if (config->magic != 0xcafebeef || config->version < 21400) {
    return Refuse(kInvalidArgument, "the configuration was not initialised");
  }
  if (size > kMostRanks || rank < 0 || rank >= size) {
    return Refuse(kInvalidArgument, "Invalid rank requested");
  }
  auto* communicator = new ncclComm();
  communicator->size = size;
  communicator->rank = rank;
  communicator->file = id.bytes;
  communicator->blocking = config->blocking != 0;
  if (Driver<int (*)(int*)>("cuCtxGetDevice")(&communicator->device) != 0) {
    delete communicator;
    return Refuse(kCudaFailed, "no device is current");
  }
  communicator->state = kInProgress;
  *handle = communicator;
  auto join = [communicator] {
    if (!Join(communicator)) return;
    for (int i = 0; i < communicator->size; ++i) {
      const bool same = communicator->shared->device[i].load() ==
                        communicator->shared->device[communicator->rank];
      if (i == communicator->rank || !same) continue;
      communicator->error = "Duplicate GPU detected : rank " + std::to_string(communicator->rank) +
                            " and rank " + std::to_string(i) + " both on one CUDA device";
      communicator->state = kInvalidUsage;
      return;
    }
    communicator->state = kSuccess;
  };
  if (communicator->blocking) {
    join();
    return communicator->state;
  }
  std::thread(join).detach();
  return kInProgress;
}

NCCL_DOUBLE int ncclCommGetAsyncError(ncclComm* communicator, int* state) {
  if (!Usable(communicator)) return kInvalidArgument;
  if (const int result = Faults::All().Take("ncclCommGetAsyncError")) return result;
  *state = communicator->state;
  return kSuccess;
}

NCCL_DOUBLE int ncclCommFinalize(ncclComm* communicator) {
  if (!Usable(communicator)) return kInvalidArgument;
  if (const int result = Faults::All().Take("ncclCommFinalize")) return result;
  communicator->state = kInProgress;
  std::thread([communicator] {
    communicator->shared->finalized.fetch_add(1);
    while (communicator->shared->finalized.load() < communicator->size) {
      if (communicator->abort) return;
      usleep(200);
    }
    communicator->state = kSuccess;
  }).detach();
  return kInProgress;
}

NCCL_DOUBLE int ncclCommAbort(ncclComm* communicator) {
  if (!Usable(communicator)) return kInvalidArgument;
  communicator->abort = true;
  communicator->ended_at = time(nullptr);
  communicator->ended = true;
  while (communicator->running.load() > 0) usleep(200);
  unlink(communicator->file.c_str());
  return Faults::All().Take("ncclCommAbort");
}

NCCL_DOUBLE int ncclCommDestroy(ncclComm* communicator) {
  if (!Usable(communicator)) return kInvalidArgument;
  while (communicator->running.load() > 0) usleep(200);
  communicator->ended_at = time(nullptr);
  communicator->ended = true;
  return Faults::All().Take("ncclCommDestroy");
}

NCCL_DOUBLE int ncclGroupStart() {
  if (const int result = Faults::All().Take("ncclGroupStart")) return result;
  ++group.depth;
  return kSuccess;
}

NCCL_DOUBLE int ncclGroupEnd() {
  if (group.depth == 0) return Refuse(kInvalidUsage, "ncclGroupEnd: not in a group call");
  const int result = EndGroup();
  const int planned = Faults::All().Take("ncclGroupEnd");
  return planned != kSuccess ? planned : result;
}

NCCL_DOUBLE int ncclAllReduce(const void* send, void* recv, size_t count, int type, int how,
                              ncclComm* communicator, Stream stream) {
  return Enqueue("ncclAllReduce", {Kind::kAllReduce, From(send), To(recv), count, type, how, 0},
                 communicator, stream);
}

NCCL_DOUBLE int ncclReduceScatter(const void* send, void* recv, size_t count, int type, int how,
                                  ncclComm* communicator, Stream stream) {
  return Enqueue("ncclReduceScatter",
                 {Kind::kReduceScatter, From(send), To(recv), count, type, how, 0}, communicator,
                 stream);
}

NCCL_DOUBLE int ncclReduce(const void* send, void* recv, size_t count, int type, int how, int root,
                           ncclComm* communicator, Stream stream) {
  return Enqueue("ncclReduce", {Kind::kReduce, From(send), To(recv), count, type, how, root},
                 communicator, stream);
}

NCCL_DOUBLE int ncclAllGather(const void* send, void* recv, size_t count, int type,
                              ncclComm* communicator, Stream stream) {
  return Enqueue("ncclAllGather", {Kind::kAllGather, From(send), To(recv), count, type, 0, 0},
                 communicator, stream);
}

NCCL_DOUBLE int ncclBroadcast(const void* send, void* recv, size_t count, int type, int root,
                              ncclComm* communicator, Stream stream) {
  return Enqueue("ncclBroadcast", {Kind::kBroadcast, From(send), To(recv), count, type, 0, root},
                 communicator, stream);
}

NCCL_DOUBLE int ncclSend(const void* send, size_t count, int type, int peer, ncclComm* communicator,
                         Stream stream) {
  return Enqueue("ncclSend", {Kind::kSend, From(send), nullptr, count, type, 0, peer}, communicator,
                 stream);
}

NCCL_DOUBLE int ncclRecv(void* recv, size_t count, int type, int peer, ncclComm* communicator,
                         Stream stream) {
  return Enqueue("ncclRecv", {Kind::kReceive, nullptr, To(recv), count, type, 0, peer},
                 communicator, stream);
}

NCCL_DOUBLE int ncclMemAlloc(void** pointer, size_t bytes) {
  if (const int result = Faults::All().Take("ncclMemAlloc")) return result;
  unsigned long long address = 0;  // NOLINT: the driver's type
  if (Driver<int (*)(unsigned long long*, size_t)>("cuMemAlloc_v2")(&address, bytes) != 0) {
    return Refuse(kCudaFailed, "out of memory");
  }
  *pointer = reinterpret_cast<void*>(address);
  return kSuccess;
}

NCCL_DOUBLE int ncclMemFree(void* pointer) {
  if (const int result = Faults::All().Take("ncclMemFree")) return result;
  return Driver<int (*)(unsigned long long)>("cuMemFree_v2")(
             reinterpret_cast<unsigned long long>(pointer)) == 0  // NOLINT
             ? kSuccess
             : kCudaFailed;
}
