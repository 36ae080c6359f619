/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_cuda_endpoint.cc
 * \brief The backend between NVIDIA's devices, on a double of the driver whose kernels are ours,
 *        compiled for the CPU: every operation, in threads and processes, on each way of mapping
 *        memory; ranks that disagree, fail or come late; and a driver of which calls fail.
 *
 * What kernels compute is tested by tests of theirs. Here integers tell who gave what.
 */
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "core/streams.h"
#include "core/teams.h"
#include "cuda/images.h"
#include "driver/device.h"
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
            "tvm_ipc_move tvm_ipc_move_push tvm_ipc_meet tvm_ipc_show tvm_ipc_await "
            "tvm_ipc_send tvm_ipc_receive tvm_ipc_write_pattern tvm_ipc_check_pattern";

const uint8_t* ImageBytes() { return reinterpret_cast<const uint8_t*>(kImage); }

}  // namespace

// In the place of those that a build without NVRTC has not got.
const KernelImage kKernelImages[] = {
    {"all", 80, true, ImageBytes(), ImageBytes() + sizeof(kImage)}};
const size_t kNumKernelImages = 1;

}  // namespace cuda

namespace {

constexpr ElementType kInt32{0, 32, 1};
constexpr ElementType kFloat32{2, 32, 1};
const size_t kCounts[] = {0, 1, 5, 36, 4099, 70001};

enum Action { kAll, kTeams, kCounts_, kKinds, kThrow, kLate, kWrong, kMessages, kStreams };

const cuda::Driver& TheDriver() { return cuda::TheDriver(); }

/*! \brief Memory of a rank's device: of its arena, or its own. */
class OnDevice {
 public:
  OnDevice(Rank& rank, size_t count, bool in_arena, ElementType type = kInt32)
      : rank_(rank), heap_(in_arena ? rank.endpoint().heap() : nullptr) {
    buffer.count = count;
    buffer.type = type;
    if (heap_ != nullptr) {
      buffer.data = heap_->Allocate(buffer.bytes());
    } else {
      memory_ = cuda::Device::Open(rank.options().device);
      const cuda::Here here(*memory_);
      cuda::Address address = 0;
      TheDriver().cuMemAlloc_v2("a test", &address, std::max<size_t>(buffer.bytes(), 1));
      buffer.data = reinterpret_cast<void*>(address);
    }
    Put(std::vector<int32_t>(count, -77));
  }
  OnDevice(Rank& rank, const std::vector<int32_t>& values, bool in_arena)
      : OnDevice(rank, values.size(), in_arena) {
    Put(values);
  }
  ~OnDevice() {
    try {
      rank_.endpoint().Synchronise();
    } catch (const Error&) {
      // A test of errors has heard of it.
    }
    if (heap_ != nullptr) {
      heap_->Free(buffer.data, buffer.bytes());
    } else {
      const cuda::Here here(*memory_);
      TheDriver().cuMemFree_v2.Try(reinterpret_cast<cuda::Address>(buffer.data));
    }
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  void Put(const std::vector<int32_t>& values) {
    Copy(buffer.data, values.data());
    rank_.endpoint().Synchronise();
  }
  std::vector<int32_t> Get() {
    rank_.endpoint().Synchronise();
    std::vector<int32_t> values(buffer.count);
    Copy(values.data(), buffer.data);
    rank_.endpoint().Synchronise();
    return values;
  }

  Buffer buffer;

 private:
  void Copy(void* to, const void* from) {
    const auto device = cuda::Device::Open(rank_.options().device);
    const cuda::Here here(*device);
    if (buffer.bytes() == 0) return;
    TheDriver().cuMemcpyAsync(
        "a test", reinterpret_cast<cuda::Address>(to), reinterpret_cast<cuda::Address>(from),
        buffer.bytes(),
        static_cast<cuda::Stream>(ProgramStreams().current(2, rank_.options().device)));
  }

  Rank& rank_;
  std::shared_ptr<Heap> heap_;
  std::shared_ptr<cuda::Device> memory_;
};

/*! \brief What rank `rank` has at `i`. */
int32_t Value(int rank, size_t i) { return static_cast<int32_t>(1000 * (rank + 1) + i % 997); }
std::vector<int32_t> Values(int rank, size_t count, size_t from = 0) {
  std::vector<int32_t> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = Value(rank, from + i);
  return values;
}
std::vector<int32_t> Sums(const std::vector<int>& ranks, size_t count, size_t from = 0) {
  std::vector<int32_t> sums(count, 0);
  for (int rank : ranks) {
    for (size_t i = 0; i < count; ++i) sums[i] += Value(rank, from + i);
  }
  return sums;
}

/*! \brief All collectives of a team, whose ranks are given, with inputs of `count` elements. */
void DoAll(Rank& rank, TeamId team, const std::vector<int>& ranks, size_t count, bool in_arena) {
  Endpoint& endpoint = rank.endpoint();
  const size_t n = ranks.size();
  const size_t me = static_cast<size_t>(rank.PlaceIn(team, "a test"));
  const std::vector<int32_t> mine = Values(rank.id(), count);
  const std::vector<int32_t> sums = Sums(ranks, count);
  OnDevice send(rank, mine, in_arena);
  OnDevice same(rank, count, in_arena);
  for (int strategy = 0; strategy <= 3; ++strategy) {
    same.Put(std::vector<int32_t>(count, -1));
    endpoint.AllReduce(send.buffer, ReduceKind::kSum, team, static_cast<Strategy>(strategy), 0,
                       same.buffer);
    EXPECT(same.Get() == sums, "all-reduce of ", count, " by strategy ", strategy);
  }
  same.Put(mine);
  endpoint.AllReduce(same.buffer, ReduceKind::kSum, team, Strategy::kAuto, kNoExitBarrier,
                     same.buffer);
  EXPECT(same.Get() == sums, "all-reduce in place of ", count);
  OnDevice whole(rank, count * n, in_arena);
  endpoint.AllGather(send.buffer, team, 0, whole.buffer);
  std::vector<int32_t> all;
  for (int r : ranks) {
    const std::vector<int32_t> part = Values(r, count);
    all.insert(all.end(), part.begin(), part.end());
  }
  EXPECT(whole.Get() == all, "all-gather of ", count);
  for (size_t root : {size_t{0}, n - 1}) {
    const bool is_root = me == root;
    const int place = static_cast<int>(root);
    endpoint.Broadcast(is_root ? &send.buffer : nullptr, place, team, 0, same.buffer);
    EXPECT(same.Get() == Values(ranks[root], count), "broadcast of ", count);
    whole.Put(is_root ? Values(rank.id(), count * n) : std::vector<int32_t>(count * n, -2));
    endpoint.Scatter(is_root ? &whole.buffer : nullptr, place, team, 0, same.buffer);
    EXPECT(same.Get() == Values(ranks[root], count, me * count), "scatter of ", count);
    endpoint.Gather(send.buffer, place, team, 0, is_root ? &whole.buffer : nullptr);
    if (is_root) EXPECT(whole.Get() == all, "gather of ", count);
    endpoint.Reduce(send.buffer, ReduceKind::kSum, place, team, 0,
                    is_root ? &same.buffer : nullptr);
    if (is_root) EXPECT(same.Get() == sums, "reduce of ", count);
  }
  whole.Put(Values(rank.id(), count * n));
  endpoint.ReduceScatter(whole.buffer, ReduceKind::kSum, team, kNoExitBarrier, same.buffer);
  EXPECT(same.Get() == Sums(ranks, count, me * count), "reduce-scatter of ", count);
  OnDevice other(rank, count * n, in_arena);
  endpoint.AllToAll(whole.buffer, {}, team, 0, other.buffer);
  all.clear();
  for (int r : ranks) {
    const std::vector<int32_t> part = Values(r, count, me * count);
    all.insert(all.end(), part.begin(), part.end());
  }
  EXPECT(other.Get() == all, "all-to-all of ", count);
  // Two inputs that stay as they are: nobody waits, unless both are copied to the same place.
  OnDevice second(rank, Values(rank.id() + 5, count), in_arena);
  endpoint.AllGather(send.buffer, team, kNoExitBarrier, whole.buffer);
  endpoint.AllGather(second.buffer, team, kNoExitBarrier, other.buffer);
  std::vector<int32_t> firsts;
  all.clear();
  for (int r : ranks) {
    const std::vector<int32_t> one = Values(r, count);
    const std::vector<int32_t> two = Values(r + 5, count);
    firsts.insert(firsts.end(), one.begin(), one.end());
    all.insert(all.end(), two.begin(), two.end());
  }
  EXPECT(whole.Get() == firsts && other.Get() == all, "all-gathers without an end, of ", count);
  Sources sources(n, -1);  // to the next one, but the first gets nothing
  for (size_t i = 1; i < n; ++i) sources[i] = static_cast<int64_t>(i) - 1;
  endpoint.Permute(send.buffer, sources, team, 0, same.buffer);
  EXPECT(same.Get() == (me == 0 ? std::vector<int32_t>(count, 0) : Values(ranks[me - 1], count)),
         "permute of ", count);
  // Member i gives i + j + count elements to member j.
  Parts parts(n * n);
  for (size_t i = 0; i < n * n; ++i) parts[i] = static_cast<int64_t>(i / n + i % n + count);
  size_t given = 0;
  size_t taken = 0;
  all.clear();
  for (size_t j = 0; j < n; ++j) {
    given += static_cast<size_t>(parts[me * n + j]);
    size_t before = 0;
    for (size_t k = 0; k < me; ++k) before += static_cast<size_t>(parts[j * n + k]);
    const std::vector<int32_t> part =
        Values(ranks[j], static_cast<size_t>(parts[j * n + me]), before);
    all.insert(all.end(), part.begin(), part.end());
    taken += part.size();
  }
  OnDevice uneven(rank, Values(rank.id(), given), in_arena);
  OnDevice came(rank, taken, in_arena);
  endpoint.AllToAll(uneven.buffer, parts, team, 0, came.buffer);
  EXPECT(came.Get() == all, "uneven all-to-all of ", count);
  if (count == 0) return;
  // What peers show, read and reduced.
  Shown shown = endpoint.Show(send.buffer, team, nullptr);
  std::vector<Buffer> of_all;
  for (size_t before = 0; before < n; ++before) {
    Buffer theirs = send.buffer;
    theirs.data = endpoint.Peer(shown, -static_cast<int64_t>(before)).data;
    of_all.push_back(theirs);
  }
  endpoint.ReduceParts(ReduceKind::kSum, team, of_all, same.buffer);
  endpoint.Hide(team, {&shown});
  send.Put(std::vector<int32_t>(count, 0));  // nobody reads it any more
  EXPECT(same.Get() == sums, "parts of ", count);
}

void DoMessages(Rank& rank, size_t count, bool in_arena) {
  Endpoint& endpoint = rank.endpoint();
  const int n = rank.num_ranks();
  OnDevice send(rank, Values(rank.id(), count), in_arena);
  OnDevice recv(rank, count, in_arena);
  const int next = (rank.id() + 1) % n;
  const int before = (rank.id() + n - 1) % n;
  const bool small = send.buffer.bytes() <= (128 << 10);
  if (small || rank.id() % 2 == 0) endpoint.Send(send.buffer, next);
  endpoint.Receive(recv.buffer, before);
  if (!small && rank.id() % 2 != 0) endpoint.Send(send.buffer, next);
  EXPECT(recv.Get() == Values(before, count), "a message of ", count);
}

void DoNorm(Rank& rank) {
  // Ones: the sum is n everywhere, and its norm 1.
  const size_t count = 96, row = 32;
  std::vector<float> ones(count, 1.0F);
  std::vector<int32_t> bits(count);
  memcpy(bits.data(), ones.data(), count * sizeof(float));
  OnDevice send(rank, bits, false), residual(rank, std::vector<int32_t>(count, 0), false);
  OnDevice weight(rank, {bits.begin(), bits.begin() + row}, false);
  OnDevice sum(rank, count, false), norm(rank, count, false);
  for (OnDevice* one : {&send, &residual, &weight, &sum, &norm}) one->buffer.type = kFloat32;
  rank.endpoint().AllReduceNorm(send.buffer, residual.buffer, {weight.buffer, nullptr, 0.0}, kWorld,
                                Strategy::kAuto, 0, sum.buffer, norm.buffer);
  bits = sum.Get();
  std::vector<float> sums(count), norms(count);
  memcpy(sums.data(), bits.data(), count * sizeof(float));
  bits = norm.Get();
  memcpy(norms.data(), bits.data(), count * sizeof(float));
  for (size_t i = 0; i < count; ++i) {
    EXPECT(sums[i] == static_cast<float>(rank.num_ranks()) && norms[i] == 1.0F, sums[i], norms[i]);
  }
}

void Do(Rank& rank, const Order& order) {
  std::vector<int> world(static_cast<size_t>(rank.num_ranks()));
  std::iota(world.begin(), world.end(), 0);
  const bool in_arena = order.seed % 2 != 0;
  OnDevice buffer(rank, Values(rank.id(), 100), in_arena);
  OnDevice result(rank, 100, in_arena);
  auto reduce = [&](size_t count, ReduceKind kind) {
    Buffer send = buffer.buffer, recv = result.buffer;
    send.count = recv.count = count;
    rank.endpoint().AllReduce(send, kind, kWorld, Strategy::kAuto, 0, recv);
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
      if (rank.id() == 1) std::this_thread::sleep_for(std::chrono::seconds(4));
      return reduce(100, ReduceKind::kSum);
    case kWrong: {
      Buffer odd = buffer.buffer;
      odd.type = {2, 32, 4};
      return rank.endpoint().AllReduce(odd, ReduceKind::kSum, kWorld, Strategy::kAuto, 0, odd);
    }
    case kStreams: {
      // One team on two streams: the second operation waits for the first.
      const auto device = cuda::Device::Open(rank.options().device);
      const cuda::Here here(*device);
      cuda::Stream stream = nullptr;
      TheDriver().cuStreamCreate("a test", &stream, cuda::kNonBlocking);
      void* const before = ProgramStreams().current(2, rank.options().device);
      rank.endpoint().AllReduce(buffer.buffer, ReduceKind::kSum, kWorld, Strategy::kAuto, 0,
                                result.buffer);
      ProgramStreams().use(2, rank.options().device, stream);
      rank.endpoint().AllReduce(result.buffer, ReduceKind::kMax, kWorld, Strategy::kAuto, 0,
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

HubOptions Options(int ranks, double timeout) {
  HubOptions options;
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
  auto hub = std::make_unique<Hub>(Options(2, 20));
  std::vector<std::thread> threads;
  const Backend& backend = FindBackend("cuda");
  for (int id = 0; id < 2; ++id) {
    threads.emplace_back([&, id] {
      Rank* rank = nullptr;
      try {
        SetCurrentRank(Join(Invitation::Unpack(hub->invitation()), backend, id, 2, 1, id));
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
          hub->AbortClosed();
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
    Ranks ranks(Ranks::Kind::kThreads, Options(3, 2), 1, Do);
    TestErrors(ranks);
  } else {
    for (int n : {1, 2, 4}) TestSession(Ranks::Kind::kThreads, n);
  }
  std::printf("passed\n");
  return 0;
}
