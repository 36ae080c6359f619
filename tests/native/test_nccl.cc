/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_nccl.cc
 * \brief The backend over NCCL, on doubles of NCCL and of the driver: every collective, teams, CUDA
 *        graphs (nccl_rounds.cc), and ranks that disagree, fail, come late or die.
 */
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/current_stream_hooks.h"
#include "core/teams.h"
#include "driver/device_properties_and_context.h"
#include "expect.h"
#include "nccl_rounds.h"
#include "nccl_values.h"
#include "ranks.h"

namespace tvm_ipc {
namespace {

const ElementType kTypes[] = {{2, 16, 1}, {4, 16, 1}, kFloat32,   {2, 64, 1}, {0, 8, 1}, {1, 8, 1},
                              kInt32,     {1, 32, 1}, {0, 64, 1}, {1, 64, 1}, {6, 8, 1}};

/*! \brief What a round does. */
enum Action {
  kAll,
  kTeams,
  kMessages,
  kMismatch,
  kMessageMismatch,
  kThrow,
  kStuck,
  kUnknownType,
  kIntegerAverage,
  kBitwise,
  kTree,
  kNorm,
  kFault,
  kTwoStreams,
  kGraphs,
  kGraphThenStuck,
  kNewTeamInGraph,
};

/*! \brief The double's functions that tests call. */
void FailNccl(const std::string& call, int number, int result) {
  Find<void (*)(const char*, int, int)>("libnccl.so.2", "ncclDoubleFail")(call.c_str(), number,
                                                                          result);
}

/*! \brief Of NCCL: what fails, with what, and what the error says. */
struct Fault {
  const char* call;
  int result;
  const char* says;
};
const Fault kFaults[] = {
    {"ncclAllReduce", 3, "ncclAllReduce: internal error: ncclAllReduce was told to fail"},
    {"ncclAllReduce", 1, "unhandled cuda error"},
    {"ncclAllReduce", 16, "a wire was cut"},
    {"ncclGroupStart", 3, "ncclGroupStart: internal error"},
    {"ncclGroupEnd", 2, "ncclGroupEnd: unhandled system error"},
    {"ncclCommGetAsyncError", 6, "remote process exited"},
};

void DoFault(Rank& rank, uint64_t seed) {
  const Fault& fault = kFaults[seed % (sizeof(kFaults) / sizeof(*kFaults))];
  if (rank.id() == static_cast<int>(seed) % rank.num_ranks()) FailNccl(fault.call, 1, fault.result);
  // On their way for some time, so that what is found out later is found out.
  OnDevice send(rank, kFloat32, 100), recv(rank, kFloat32, 100);
  {
    const Gate gate;
    On(rank).AllReduce(send, ReduceKind::kSum, kWorld, Strategy::kAuto, 0, recv);
    usleep(100000);
  }
  rank.endpoint().Settle();
}

void DoNewTeamInGraph(Rank& rank, uint64_t seed) {
  std::vector<int> ranks;
  for (int i = 0; i < rank.num_ranks(); ++i) ranks.push_back(i);
  const TeamId team = TeamOf(rank.control(), ranks, static_cast<uint32_t>(100 + seed));
  void* stream = nullptr;
  void* graph = nullptr;
  Drive<void**, unsigned>("cuStreamCreate", &stream, 1u);
  ProgramStreams().use(2, rank.id(), stream);
  constexpr int kThreadLocal = 1;
  Drive("cuStreamBeginCapture_v2", stream, kThreadLocal);
  OnDevice data(rank, kFloat32, 8);
  const Error error =
      ErrorOf([&] { On(rank).AllReduce(data, ReduceKind::kSum, team, Strategy::kAuto, 0, data); });
  Drive<void*, void**>("cuStreamEndCapture", stream, &graph);
  ProgramStreams().use(2, rank.id(), nullptr);
  throw error;
}

void Do(Rank& rank, const Order& order) {
  const uint64_t seed = order.seed;
  const int me = rank.id();
  const auto device = cuda::Device::Open(me);
  const cuda::Here here(*device);
  OnDevice some(rank, kFloat32, 64);
  switch (static_cast<Action>(order.action)) {
    case kAll: {
      const ElementType type = kTypes[seed % (sizeof(kTypes) / sizeof(*kTypes))];
      for (const size_t count : kCounts) DoAll(rank, World(rank), type, count, seed);
      return DoUnequalParts(rank, World(rank), seed);
    }
    case kTeams:
      return DoTeams(rank, seed);
    case kMessages:
      return DoMessages(rank, seed);
    case kMismatch: {
      const Buffer less = some.Slice(0, me == 0 ? 64 : 63);
      return On(rank).AllReduce(less, ReduceKind::kSum, kWorld, Strategy::kAuto, 0, less);
    }
    case kMessageMismatch:
      if (me == 0) rank.endpoint().Send(some, 1);
      if (me == 1) rank.endpoint().Receive(some.Slice(0, 63), 0);
      return rank.endpoint().Settle();
    case kThrow:
      if (me == 1) Fail(kind::kValue, "the program of this rank is wrong");
      return SumWorld(rank);
    case kStuck: {
      // The rank's device does not come to what its peers wait for.
      OnDevice out(rank, kFloat32, 64);
      std::unique_ptr<Gate> gate = me == 1 ? std::make_unique<Gate>() : nullptr;
      On(rank).AllReduce(some, ReduceKind::kSum, kWorld, Strategy::kAuto, 0, out);
      if (me == 1) {
        while (rank.control().abort.load() == 0) usleep(1000);
        gate.reset();
      }
      return rank.endpoint().Settle();
    }
    case kUnknownType: {
      const OnDevice other(rank, {0, 16, 1}, 4);
      return On(rank).AllReduce(other, ReduceKind::kSum, kWorld, Strategy::kAuto, 0, other);
    }
    case kIntegerAverage: {
      const OnDevice other(rank, kInt32, 4);
      return On(rank).AllReduce(other, ReduceKind::kAvg, kWorld, Strategy::kAuto, 0, other);
    }
    case kTree:
      return On(rank).AllReduce(some, ReduceKind::kTreeSum, kWorld, Strategy::kAuto, 0, some);
    case kBitwise: {
      const OnDevice other(rank, kInt32, 4);
      return On(rank).AllReduce(other, ReduceKind::kBxor, kWorld, Strategy::kAuto, 0, other);
    }
    case kNorm: {
      const OnDevice sums(rank, kFloat32, 64), norms(rank, kFloat32, 64), weight(rank, kFloat32, 8);
      return On(rank).AllReduceNorm(some, sums, {weight, nullptr, 1e-5}, kWorld, Strategy::kAuto, 0,
                                    sums, norms);
    }
    case kFault:
      return DoFault(rank, seed);
    case kTwoStreams:
      return DoTwoStreams(rank);
    case kGraphs:
    case kGraphThenStuck:
      return DoGraphs(rank, order.action == kGraphThenStuck);
    case kNewTeamInGraph:
      return DoNewTeamInGraph(rank, seed);
  }
}

SessionServerOptions OptionsFor(int num_ranks, double timeout) {
  SessionServerOptions options;
  options.backend = &FindBackend("nccl");
  options.num_ranks = num_ranks;
  options.timeout_seconds = timeout;
  return options;
}

/*! \brief The round ends in an error with these words, and the next one is right. */
void ExpectWords(Ranks& ranks, int action, uint64_t seed, const std::string& kind,
                 const std::string& words) {
  bool found = false;
  std::string all;
  for (const RankReport& report : ranks.Round(action, seed)) {
    all += Text("\n  rank ", report.rank, ": ", report.kind, ": ", report.message);
    found = found || (report.kind == kind && Contains(report.message, words));
    EXPECT(report.kind == kind || report.kind == kind::kPeer, "action ", action, all);
  }
  EXPECT(found, "action ", action, " with seed ", seed, ": no ", kind, " says ", words, all);
  Expect(ranks, kAll, seed, "");
}

void TestValues(Ranks::Kind kind, int num_ranks, int num_groups) {
  Ranks ranks(kind, OptionsFor(num_ranks, 60), num_groups, Do);
  const uint64_t rounds = num_ranks == 2 ? 11 : 2;
  for (uint64_t seed = 0; seed < rounds; ++seed) Expect(ranks, kAll, seed + 3 * num_ranks, "");
  for (uint64_t seed = 0; seed < 2; ++seed) Expect(ranks, kTeams, seed, "");
  Expect(ranks, kMessages, 1, "");
  if (kind == Ranks::Kind::kProcesses) Expect(ranks, kTwoStreams, 1, "");
}

void TestErrors() {
  Ranks ranks(Ranks::Kind::kThreads, OptionsFor(3, 60), 1, Do);
  ExpectWords(ranks, kMismatch, 0, kind::kMismatch,
              "rank 0 called allreduce(sum, strategy 3, flags 0) of 64 x float32; rank 1 called "
              "allreduce(sum, strategy 3, flags 0) of 63 x float32");
  ExpectWords(ranks, kMessageMismatch, 1, kind::kMismatch,
              "rank 0 called send of 64 x float32 to rank 1, which wanted to receive 63");
  ExpectWords(ranks, kThrow, 2, kind::kValue, "the program of this rank is wrong");
  ExpectWords(ranks, kUnknownType, 3, kind::kType,
              "allreduce: NCCL does not do sum of int16: it has no such type");
  ExpectWords(ranks, kIntegerAverage, 4, kind::kType,
              "its average of integers is wrong where their sum does not fit");
  ExpectWords(ranks, kBitwise, 4, kind::kType,
              "NCCL does not do bxor of int32: it has no bitwise reductions; use the backend cuda");
  ExpectWords(ranks, kTree, 4, kind::kType,
              "NCCL does not do tree_sum of float32: it adds in an order of its own; use the "
              "backend cuda, or sum");
  ExpectWords(ranks, kNorm, 5, kind::kValue, "NCCL has no norms");
  uint64_t seed = 0;
  for (const Fault& fault : kFaults) ExpectWords(ranks, kFault, seed++, kind::kRuntime, fault.says);
  ExpectWords(ranks, kNewTeamInGraph, 7, kind::kRuntime,
              "cannot be made while a CUDA graph is captured");
}

void TestDeadline() {
  Ranks ranks(Ranks::Kind::kThreads, OptionsFor(2, 1), 1, Do);
  ExpectWords(ranks, kStuck, 0, kind::kDeadline,
              "has not ended within 1 s: a peer's device has not come to it");
  ExpectWords(ranks, kStuck, 1, kind::kDeadline, "allreduce(sum, strategy 3, flags 0) of 64 x");
}

void TestGraphs(Ranks::Kind kind) {
  Ranks ranks(kind, OptionsFor(3, 60), 1, Do);
  Expect(ranks, kGraphs, 0, "");
  // An error while nothing is on its way leaves graphs as they are.
  ExpectWords(ranks, kThrow, 1, kind::kValue, "the program of this rank is wrong");
  Expect(ranks, kGraphs, 2, "");
  bool refused = false;
  EXPECT(!ranks.Round(kGraphThenStuck, 3).empty());
  for (const RankReport& report : ranks.Round(kAll, 4)) {
    refused = refused || Contains(report.message, "they cannot run any more: open a new session");
  }
  EXPECT(refused);
}

void TestStart() {
  FailNccl("ncclCommInitRankConfig", 1, 3);
  SessionServerOptions options = OptionsFor(2, 10);
  SessionServer server(options);
  std::vector<std::thread> threads;
  std::atomic<int> told{0};
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const Error error = ErrorOf([&] {
        Join(Invitation::Unpack(server.invitation()), *options.backend, rank, 2, 1, rank);
      });
      told += Contains(error.what(), "the communicator: ncclCommInitRankConfig: internal error");
      if (!Contains(error.what(), "internal error")) {
        EXPECT(Contains(error.what(), "NCCL waited 10 s") || Contains(error.what(), "stopped"),
               error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(told == 1);
  EXPECT(Contains(options.backend->Refusal({1, 1}), "NCCL wants a device for each worker"));
  EXPECT(options.backend->Refusal({0, 1}).empty());
}

/*! \brief A rank dies while its peers wait on their devices. */
void TestDeath() {
  Ranks ranks(Ranks::Kind::kProcesses, OptionsFor(3, 60), 1, Do);
  Expect(ranks, kAll, 0, "");
  const uint64_t ticket = ranks.Begin(kStuck, 1);
  usleep(300000);
  ranks.Kill(1);
  EXPECT(ranks.server().worker_table().WaitDone(ticket, 30) == WorkerTable::Progress::kAttention);
  int told = 0;
  for (int i = 0; i < 600 && told < 2; ++i) {
    told = 0;
    for (const RankReport& report : ranks.server().worker_table().Report().errors) {
      EXPECT(report.kind == kind::kPeer, report.message);
      EXPECT(Contains(report.message,
                      "allreduce(sum, strategy 3, flags 0) of 64 x float32 was "
                      "stopped: rank 1 (pid "),
             report.message);
      EXPECT(Contains(report.message, ") died"), report.message);
      ++told;
    }
    usleep(50000);
  }
  EXPECT(told == 2, "only ", told, " ranks were told of the death");
  ranks.GiveUp();
}

/*! \brief Of the driver: what the backend calls while it works. */
const char* const kDriverCalls[] = {
    "cuInit",           "cuDeviceGetCount",    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent", "cuEventCreate",       "cuEventRecord",
    "cuEventQuery",     "cuStreamIsCapturing", "cuMemcpyAsync",
    "cuMemsetD8Async",  "cuLaunchHostFunc",    "cuMemAlloc",
    "cuStreamQuery",    "cuCtxGetDevice",      "cuDeviceGetUuid",
    "cuMemFree"};

/*! \brief TVM_IPC_DOUBLE_FAIL says which call of the driver fails in this process. */
void TestFaultOfTheDriver(const std::string& call) {
  const SessionServerOptions options = OptionsFor(2, 10);
  SessionServer server(options);
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::vector<Error> errors;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        SetCurrentRank(
            Join(Invitation::Unpack(server.invitation()), *options.backend, rank, 2, 1, rank));
        DoAll(*CurrentRank(), World(*CurrentRank()), kFloat32, 500, 1);
        DoMessages(*CurrentRank(), 1);
      } catch (const Error& error) {
        std::lock_guard<std::mutex> lock(mutex);
        errors.push_back(error);
        if (CurrentRank() != nullptr) {
          CurrentRank()->FailSession();
        } else {
          server.AbortClosed();  // as the controller does when it hears of it
        }
      }
      SetCurrentRank(nullptr);
    });
  }
  for (std::thread& thread : threads) thread.join();
  bool told = errors.empty();
  for (const Error& error : errors) {
    const std::string text = error.what();
    told = told || Contains(text, call) || Contains(text, "failed") || Contains(text, "driver") ||
           Contains(text, "cuda error");
    std::printf("%s: %s\n", error.kind(), error.what());
  }
  EXPECT(told, "no error says that ", call, " failed");
}

/*! \brief Each of them once, in processes of their own: a clear error, or none, and no hang. */
void TestFaultsOfTheDriver(const char* self) {
  for (const std::string call : kDriverCalls) {
    for (const int number : {1, 9}) {
      const std::string fail = Text(call, ":", number, "=999");
      setenv("TVM_IPC_DOUBLE_FAIL", fail.c_str(), 1);
      const pid_t child = fork();
      if (child == 0) {
        alarm(60);
        freopen("/dev/null", "w", stdout);
        execl(self, self, "--fault", call.c_str(), nullptr);
        std::_Exit(2);
      }
      int status = 0;
      waitpid(child, &status, 0);
      EXPECT(status == 0, fail, ": the process ended with status ", status);
    }
  }
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  using namespace tvm_ipc;
  const std::string mode = argc > 1 ? argv[1] : "";
  FindBackend("nccl").UseLibrary("libnccl.so.2");
  if (mode == "--fault") {
    TestFaultOfTheDriver(argv[2]);
  } else if (mode == "--faults") {
    TestFaultsOfTheDriver(argv[0]);
  } else if (mode == "--processes") {
    TestValues(Ranks::Kind::kProcesses, 2, 1);
    TestValues(Ranks::Kind::kProcesses, 4, 2);
    TestGraphs(Ranks::Kind::kProcesses);
    TestDeath();
  } else {
    for (const int num_ranks : {1, 2, 3, 5}) TestValues(Ranks::Kind::kThreads, num_ranks, 1);
    TestValues(Ranks::Kind::kThreads, 8, 2);
    TestStart();
    TestErrors();
    TestDeadline();
    TestGraphs(Ranks::Kind::kThreads);
  }
  std::printf("passed\n");
  return 0;
}
