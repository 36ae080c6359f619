/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_cuda_endpoint.cc
 * \brief The backend between NVIDIA's devices, on a double of the driver whose kernels are ours,
 *        compiled for the CPU: every operation, in threads and processes, on each way of mapping
 *        memory; ranks that disagree, fail or come late; and a driver of which calls fail.
 *
 * What kernels compute is tested by tests of theirs. Here integers tell who gave what;
 * what ranks do with them is in cuda_rounds.cc.
 */
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "core/current_stream_hooks.h"
#include "core/teams.h"
#include "cuda/embedded_kernel_images.h"
#include "cuda_rounds.h"
#include "driver/device_properties_and_context.h"
#include "expect.h"
#include "ranks.h"

namespace tvm_ipc {

namespace cuda {

namespace {

/*! \brief What the double takes for code of a GPU; it has the names of all kernels. */
const char kImage[] = ".version 9.0 "
#define TYPE(type)                                                           \
  "tvm_ipc_push_" #type " tvm_ipc_push_slices_" #type " tvm_ipc_pull_" #type \
  " tvm_ipc_parts_" #type " "
    TYPE(float16) TYPE(bfloat16) TYPE(float32) TYPE(float64) TYPE(int8) TYPE(uint8) TYPE(int16)
        TYPE(uint16) TYPE(int32) TYPE(uint32) TYPE(int64) TYPE(uint64) TYPE(bool)
#undef TYPE
            "tvm_ipc_push_norm_float16 tvm_ipc_push_norm_bfloat16 tvm_ipc_push_norm_float32 "
            "tvm_ipc_norm_float16 tvm_ipc_norm_bfloat16 tvm_ipc_norm_float32 "
            "tvm_ipc_move tvm_ipc_move_push tvm_ipc_barrier tvm_ipc_expose tvm_ipc_await "
            "tvm_ipc_send tvm_ipc_receive tvm_ipc_write_pattern tvm_ipc_check_pattern";

const uint8_t* ImageBytes() { return reinterpret_cast<const uint8_t*>(kImage); }

}  // namespace

// In the place of those that a build without NVRTC has not got.
const KernelImage kKernelImages[] = {
    {"move", 80, true, ImageBytes(), ImageBytes() + sizeof(kImage)},
    {"norm", 80, true, ImageBytes(), ImageBytes() + sizeof(kImage)},
    {"reduce", 80, true, ImageBytes(), ImageBytes() + sizeof(kImage)}};
const size_t kNumKernelImages = 3;

}  // namespace cuda

namespace {

const size_t kCounts[] = {0, 1, 5, 36, 4099, 70001};

enum Action { kAll, kTeams, kCounts_, kKinds, kThrow, kLate, kWrong, kMessages, kStreams };

const cuda::Driver& TheDriver() { return cuda::TheDriver(); }
void Do(Rank& rank, const Order& order) {
  std::vector<int> world(static_cast<size_t>(rank.num_ranks()));
  std::iota(world.begin(), world.end(), 0);
  const bool in_arena = order.seed % 2 != 0;
  OnDevice buffer(rank, Values(rank.id(), 100), in_arena);
  OnDevice result(rank, 100, in_arena);
  auto reduce = [&](size_t count, ReduceKind kind) {
    Buffer send = buffer.buffer, recv = result.buffer;
    send.count = recv.count = count;
    On(rank).AllReduce(send, kind, kWorld, Strategy::kAuto, 0, recv);
    rank.endpoint().Synchronise();
  };
  switch (order.action) {
    case kAll:
      return DoAll(rank, kWorld, world, kCounts[order.seed / 2 % std::size(kCounts)], in_arena);
    case kTeams: {
      // The others first, then this one: in an order of its own.
      std::vector<int> ranks = {world.back(), 0};
      const TeamId team = TeamOf(rank.control(), ranks, 0);
      if (rank.id() == 0 || rank.id() == world.back()) DoAll(rank, team, ranks, 777, in_arena);
      DoNorm(rank);
      return DoAll(rank, kWorld, world, 12, in_arena);
    }
    case kMessages:
      return DoMessages(rank, kCounts[order.seed / 2 % std::size(kCounts)], in_arena);
    case kCounts_:
      return reduce(rank.id() == 1 ? 50 : 100, ReduceKind::kSum);
    case kKinds:
      return reduce(100, rank.id() == 1 ? ReduceKind::kMax : ReduceKind::kSum);
    case kThrow:
      if (rank.id() == 1) Fail(kind::kValue, "rank 1 does not want to");
      return reduce(100, ReduceKind::kSum);
    case kLate:
      if (rank.id() == 1)
        std::this_thread::sleep_for(std::chrono::duration<double>(2 * kShortTimeout));
      return reduce(100, ReduceKind::kSum);
    case kWrong: {
      Buffer odd = buffer.buffer;
      odd.type = {2, 32, 4};
      return On(rank).AllReduce(odd, ReduceKind::kSum, kWorld, Strategy::kAuto, 0, odd);
    }
    case kStreams: {
      // One team on two streams: the second operation waits for the first.
      const auto device = cuda::Device::Open(rank.options().device);
      const cuda::Here here(*device);
      cuda::Stream stream = nullptr;
      TheDriver().cuStreamCreate("a test", &stream, cuda::kNonBlocking);
      void* const before = ProgramStreams().current(2, rank.options().device);
      On(rank).AllReduce(buffer.buffer, ReduceKind::kSum, kWorld, Strategy::kAuto, 0,
                         result.buffer);
      ProgramStreams().use(2, rank.options().device, stream);
      On(rank).AllReduce(result.buffer, ReduceKind::kMax, kWorld, Strategy::kAuto, 0,
                         buffer.buffer);
      EXPECT(buffer.Get() == Sums(world, 100), "two streams");
      ProgramStreams().use(2, rank.options().device, before);
      TheDriver().cuStreamDestroy_v2("a test", stream);  // the team's last one, which is gone now
      return reduce(100, ReduceKind::kSum);
    }
    default:
      return;
  }
}

SessionServerOptions Options(int ranks, double timeout) {
  SessionServerOptions options;
  options.num_ranks = ranks;
  options.timeout_seconds = timeout;
  options.arena_bytes = 16 << 20;
  options.backend = &FindBackend("cuda");
  return options;
}

/*! \brief The kinds of errors of a round, and the first message of the kind. */
void ExpectError(Ranks& ranks, int action, const char* kind, const std::string& part) {
  bool found = false;
  for (const RankReport& report : ranks.Round(action, 1)) {
    const bool follows = report.kind == kind::kPeer;
    EXPECT(report.kind == kind || follows, report.kind, ": ", report.message);
    if (report.kind != kind) continue;
    found = found || Contains(report.message, part);
    EXPECT(Contains(report.message, part) || follows, report.message, " has no ", part);
  }
  EXPECT(found, "no ", kind, " that says ", part);
  Expect(ranks, kAll, 7, "");
}

void TestErrors(Ranks& ranks) {
  ExpectError(ranks, kCounts_, kind::kMismatch,
              "allreduce(sum, strategy 3, flags 0) of 50 x int32");
  ExpectError(ranks, kKinds, kind::kMismatch, "allreduce(max, strategy 3, flags 0) of 100 x int32");
  ExpectError(ranks, kThrow, kind::kValue, "rank 1 does not want to");
  ExpectError(ranks, kWrong, kind::kType, "sum of float32x4 is not supported");
  ExpectError(ranks, kLate, kind::kDeadline, "for rank 1 (pid ");
}

void TestSession(Ranks::Kind kind, int n) {
  Ranks ranks(kind, Options(n, 60), 1, Do);
  for (uint64_t seed = 0; seed < 2 * std::size(kCounts); ++seed) {
    Expect(ranks, kAll, seed, "");
    if (n > 1) Expect(ranks, kMessages, seed, "");
  }
  if (n > 1) Expect(ranks, kTeams, 0, "");
  if (n > 1) Expect(ranks, kTeams, 1, "");
  Expect(ranks, kStreams, 1, "");
  Expect(ranks, kStreams, 0, "");
}

/*! \brief A whole session of two threads that may fail anywhere; it ends in any case. */
int Once() {
  std::mutex mutex;
  std::vector<std::string> errors;
  auto server = std::make_unique<SessionServer>(Options(2, 20));
  std::vector<std::thread> threads;
  const Backend& backend = FindBackend("cuda");
  for (int id = 0; id < 2; ++id) {
    threads.emplace_back([&, id] {
      Rank* rank = nullptr;
      try {
        SetCurrentRank(Join(Invitation::Unpack(server->invitation()), backend, id, 2, 1, id));
        rank = CurrentRank();
        DoAll(*rank, kWorld, {0, 1}, 70001, false);
        DoMessages(*rank, 5, true);
        rank->endpoint().Settle();
      } catch (const Error& error) {
        std::lock_guard<std::mutex> lock(mutex);
        errors.push_back(Text(error.kind(), ": ", error.what()));
        if (rank != nullptr)
          rank->FailSession();
        else
          server->AbortClosed();
      }
      SetCurrentRank(nullptr);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) std::printf("%s\n", error.c_str());
  return 0;
}

/*! \brief Each function that a session calls fails, the first time and some time later. */
void TestFaults(const char* program) {
  const char* const functions[] = {"cuInit",
                                   "cuDeviceGetCount",
                                   "cuDevicePrimaryCtxRetain",
                                   "cuMemGetInfo",
                                   "cuMemHostAlloc",
                                   "cuMemHostRegister",
                                   "cuMemHostGetDevicePointer",
                                   "cuMemcpyAsync",
                                   "cuMemsetD8Async",
                                   "cuMemGetAllocationGranularity",
                                   "cuMemCreate",
                                   "cuMemAddressReserve",
                                   "cuMemMap",
                                   "cuMemSetAccess",
                                   "cuMemExportToShareableHandle",
                                   "cuMemImportFromShareableHandle",
                                   "cuStreamCreate",
                                   "cuStreamSynchronize",
                                   "cuEventCreate",
                                   "cuEventRecord",
                                   "cuStreamWaitEvent",
                                   "cuModuleLoadData",
                                   "cuModuleGetFunction",
                                   "cuFuncGetAttribute",
                                   "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                                   "cuLaunchKernel"};
  int seen = 0;
  for (const char* function : functions) {
    for (int call : {1, 2, 9}) {
      int ends[2];
      EXPECT(pipe(ends) == 0);
      const pid_t child = fork();
      if (child == 0) {
        dup2(ends[1], 1);
        setenv("TVM_IPC_DOUBLE_FAIL", Text(function, ":", call, "=999").c_str(), 1);
        alarm(60);  // what hangs dies
        execl(program, program, "--once", nullptr);
        std::_Exit(127);
      }
      close(ends[1]);
      std::string said;
      char bytes[4096];
      for (ssize_t got; (got = read(ends[0], bytes, sizeof(bytes))) > 0;) said.append(bytes, got);
      close(ends[0]);
      int status = 0;
      waitpid(child, &status, 0);
      EXPECT(status == 0, function, " fails in call ", call, ": status ", status, ": ", said);
      const bool told = Contains(said, "CUDA_ERROR_UNKNOWN") || Contains(said, "999");
      EXPECT(said.empty() || told || Contains(said, "is not initialised"), function, ": ", said);
      seen += told;
    }
  }
  EXPECT(seen > 30, "only ", seen, " of the faults were told");
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  using namespace tvm_ipc;
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "--once") return Once();
  if (mode == "--faults") {
    TestFaults(argv[0]);
  } else if (mode == "--processes") {
    TestSession(Ranks::Kind::kProcesses, 3);
  } else if (mode == "--errors") {
    Ranks ranks(Ranks::Kind::kThreads, Options(3, kShortTimeout), 1, Do);
    TestErrors(ranks);
  } else {
    for (int n : {1, 2, 4}) TestSession(Ranks::Kind::kThreads, n);
  }
  std::printf("passed\n");
  return 0;
}
