/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file nccl_rounds.cc
 * \brief Every collective over NCCL and its values, teams, messages, streams and CUDA graphs.
 */
#include "nccl_rounds.h"

#include <algorithm>
#include <cstring>

#include "collective_calls.h"
#include "core/current_stream_hooks.h"
#include "core/teams.h"
#include "nccl_values.h"

namespace tvm_ipc {
namespace {

bool Averages(ElementType type, ReduceKind kind) {
  constexpr uint8_t kInt = 0, kUInt = 1, kBool = 6;
  return kind != ReduceKind::kAvg ||
         (type.code != kInt && type.code != kUInt && type.code != kBool);
}

}  // namespace

Members World(const Rank& rank) {
  Members world{kWorld, {}, static_cast<size_t>(rank.id())};
  for (int i = 0; i < rank.num_ranks(); ++i) world.ranks.push_back(i);
  return world;
}

void DoAll(Rank& rank, const Members& team, ElementType type, size_t count, uint64_t seed) {
  Endpoint& endpoint = rank.endpoint();
  const size_t n = team.size();
  const int root = static_cast<int>(seed % n);
  auto number = [&](size_t member, size_t i) {
    return NumberOf(seed, type, team.ranks[member], i);
  };
  auto mine = [&](size_t i) { return number(team.me, i); };
  auto reduced = [&](ReduceKind kind, size_t i) {
    std::vector<double> numbers;
    for (size_t k = 0; k < n; ++k) numbers.push_back(number(k, i));
    return Reduced(kind, type, numbers);
  };
  OnDevice send(rank, type, count), recv(rank, type, count), all(rank, type, count * n),
      parts(rank, type, count * n), in_place(rank, type, count), numbers(rank, {0, 64, 1}, 1);
  send.Fill(mine);
  parts.Fill(mine);
  for (int k = 0; k <= 4; ++k) {
    const auto kind = static_cast<ReduceKind>(k);
    if (!Averages(type, kind)) continue;
    auto expected = [&](size_t i) { return reduced(kind, i); };
    On(endpoint).AllReduce(send, kind, team.id, Strategy::kAuto, 0, recv);
    endpoint.Settle();
    recv.Expect("allreduce", expected);
    in_place.Fill(mine);
    On(endpoint).AllReduce(in_place, kind, team.id, Strategy::kDefault, 0, in_place);
    On(endpoint).Reduce(send, kind, root, team.id, 0, &recv.buffer());
    OnDevice part(rank, type, count);
    On(endpoint).ReduceScatter(parts, kind, team.id, 0, part);
    endpoint.Settle();
    in_place.Expect("allreduce in place", expected);
    if (static_cast<size_t>(root) == team.me) recv.Expect("reduce", expected);
    part.Expect("reduce_scatter", [&](size_t i) { return reduced(kind, team.me * count + i); });
  }
  auto from_all = [&](size_t i) { return number(i / count, i % count); };
  On(endpoint).AllGather(send, team.id, 0, all);
  endpoint.Settle();
  all.Expect("allgather", from_all);
  const Buffer own = all.Slice(team.me * count, count);
  On(endpoint).AllGather(own, team.id, 0, all);
  On(endpoint).Broadcast(&send.buffer(), root, team.id, 0, recv);
  endpoint.Settle();
  all.Expect("allgather in place", from_all);
  recv.Expect("broadcast", [&](size_t i) { return number(static_cast<size_t>(root), i); });
  const bool is_root = team.me == static_cast<size_t>(root);
  On(endpoint).Scatter(is_root ? &parts.buffer() : nullptr, root, team.id, 0, recv);
  On(endpoint).Gather(send, root, team.id, 0, is_root ? &all.buffer() : nullptr);
  endpoint.Settle();
  recv.Expect("scatter",
              [&](size_t i) { return number(static_cast<size_t>(root), team.me * count + i); });
  all.Expect("gather", from_all);
  On(endpoint).AllToAll(parts, {}, team.id, 0, all);
  endpoint.Settle();
  all.Expect("all_to_all",
             [&](size_t i) { return number(i / count, team.me * count + i % count); });
  Sources sources(n);
  for (size_t k = 0; k < n; ++k) {
    sources[k] = k == seed % n ? -1 : static_cast<int64_t>((k + seed) % n);
  }
  On(endpoint).Permute(send, sources, team.id, 0, recv);
  endpoint.Settle();
  recv.Expect("permute", [&](size_t i) {
    return sources[team.me] < 0 ? 0 : number(static_cast<size_t>(sources[team.me]), i);
  });
  endpoint.Copy(send, recv);
  const int64_t written = (static_cast<int64_t>(seed) << 33) - 5;
  endpoint.WriteNumber(written, numbers);
  endpoint.Settle();
  recv.Expect("copy", mine);
  EXPECT(memcmp(numbers.buffer().data, &written, sizeof(written)) == 0);
  endpoint.Clear(recv);
  endpoint.Settle();
  recv.Expect("zeros", [](size_t) { return 0; });
}

void DoUnequalParts(Rank& rank, const Members& team, uint64_t seed) {
  const size_t n = team.size();
  SplitCounts parts(n * n);
  for (size_t i = 0; i < n * n; ++i) parts[i] = static_cast<int64_t>((seed * i * 7 + i) % 3 * i);
  auto part = [&](size_t from, size_t to) { return static_cast<size_t>(parts[from * n + to]); };
  size_t given = 0, taken = 0;
  for (size_t k = 0; k < n; ++k) given += part(team.me, k), taken += part(k, team.me);
  OnDevice send(rank, kInt32, given), recv(rank, kInt32, taken);
  auto number = [&](size_t from, size_t to, size_t i) {
    return static_cast<double>(from * 10000 + to * 1000 + i);
  };
  std::vector<double> out, in;
  for (size_t to = 0; to < n; ++to) {
    for (size_t i = 0; i < part(team.me, to); ++i) out.push_back(number(team.me, to, i));
  }
  for (size_t from = 0; from < n; ++from) {
    for (size_t i = 0; i < part(from, team.me); ++i) in.push_back(number(from, team.me, i));
  }
  EXPECT(out.size() == given);
  send.Fill([&](size_t i) { return out[i]; });
  On(rank).AllToAll(send, parts, team.id, 0, recv);
  rank.endpoint().Settle();
  recv.Expect("all_to_all of parts", [&](size_t i) { return in[i]; });
}

void DoTeams(Rank& rank, uint64_t seed) {
  const int n = rank.num_ranks();
  const int me = rank.id();
  auto use = [&](std::vector<int> ranks, uint32_t copy) {
    const TeamId id = TeamOf(rank.control(), ranks, copy);
    const auto place = std::find(ranks.begin(), ranks.end(), me) - ranks.begin();
    if (static_cast<size_t>(place) == ranks.size()) return;
    DoAll(rank, {id, ranks, static_cast<size_t>(place)}, kFloat32, 1 + seed % 50, seed);
    DoUnequalParts(rank, {id, ranks, static_cast<size_t>(place)}, seed);
  };
  // Pairs that have nobody in common; nobody but their members knows when they are made.
  const int partner = me ^ 1;
  if (partner < n) use({std::max(me, partner), std::min(me, partner)}, 0);
  if (me % 2 == 0) {
    std::vector<int> even;
    for (int i = 0; i < n; i += 2) even.push_back(i);
    use(even, static_cast<uint32_t>(seed % 2));
  }
  std::vector<int> backwards;
  for (int i = n; i-- > 0;) backwards.push_back(i);
  use(backwards, 0);
  use({me}, 0);
  const int group = rank.group_size();
  std::vector<int> mine;
  for (int i = 0; i < group; ++i) mine.push_back(me / group * group + i);
  DoAll(rank, {kGroup, mine, static_cast<size_t>(me % group)}, kInt32, 77, seed);
}

void DoMessages(Rank& rank, uint64_t seed) {
  const int n = rank.num_ranks();
  const int me = rank.id();
  for (const size_t count : kCounts) {
    OnDevice out(rank, kFloat32, count), in(rank, kFloat32, count);
    out.Fill([&](size_t i) { return NumberOf(seed, kFloat32, me, i); });
    // A chain, more than two messages ahead of who receives them.
    for (int message = 0; message < 5; ++message) {
      if (me > 0) rank.endpoint().Receive(in, me - 1);
      if (me + 1 < n) rank.endpoint().Send(out, me + 1);
    }
    rank.endpoint().Settle();
    if (me > 0) {
      in.Expect("receive", [&](size_t i) { return NumberOf(seed, kFloat32, me - 1, i); });
    }
  }
}

void SumWorld(Rank& rank) {
  OnDevice send(rank, kFloat32, 1000), recv(rank, kFloat32, 1000);
  send.Fill([](size_t) { return 1; });
  On(rank).AllReduce(send, ReduceKind::kSum, kWorld, Strategy::kAuto, 0, recv);
  rank.endpoint().Settle();
  recv.Expect("allreduce", [&](size_t) { return static_cast<double>(rank.num_ranks()); });
}

void DoTwoStreams(Rank& rank) {
  void* streams[2];
  for (void*& stream : streams) Drive<void**, unsigned>("cuStreamCreate", &stream, 1u);
  OnDevice send(rank, kFloat32, 5000), recv(rank, kFloat32, 5000);
  send.Fill([](size_t) { return 1; });
  double sum = 1;
  for (int i = 0; i < 7; ++i) {
    ProgramStreams().use(2, rank.id(), streams[i % 2]);
    On(rank).AllReduce(send, ReduceKind::kSum, kWorld, Strategy::kAuto, 0, send);
    sum *= rank.num_ranks();
  }
  rank.endpoint().Settle();
  send.Expect("allreduce on two streams", [&](size_t) { return sum; });
  ProgramStreams().use(2, rank.id(), nullptr);
  for (void* stream : streams) Drive("cuStreamDestroy_v2", stream);
}

void DoGraphs(Rank& rank, bool stuck) {
  const bool alone = rank.control().controller_pid != getpid();
  constexpr size_t kCount = 333;
  void* stream = nullptr;
  void* graph = nullptr;
  void* launched = nullptr;
  Drive<void**, unsigned>("cuStreamCreate", &stream, 1u);
  OnDevice data(rank, kFloat32, kCount);
  data.Fill([](size_t) { return 1; });
  SumWorld(rank);
  ProgramStreams().use(2, rank.id(), stream);
  // On its way during the capture, so that the watch asks the driver for it meanwhile.
  void* other = nullptr;
  OnDevice flying(rank, kFloat32, kCount);
  Drive<void**, unsigned>("cuStreamCreate", &other, 1u);
  auto gate = std::make_unique<Gate>(other);
  ProgramStreams().use(2, rank.id(), other);
  On(rank).AllReduce(flying, ReduceKind::kMax, kWorld, Strategy::kAuto, 0, flying);
  ProgramStreams().use(2, rank.id(), stream);
  // As TVM captures: in mode "global", which forbids some calls to all threads of the process. With
  // ranks that are threads of one the test itself would make such calls.
  constexpr int kThreadLocal = 1;
  constexpr int kGlobal = 0;
  Drive("cuStreamBeginCapture_v2", stream, alone ? kGlobal : kThreadLocal);
  usleep(50000);
  On(rank).AllReduce(data, ReduceKind::kSum, kWorld, Strategy::kAuto, 0, data);
  On(rank).AllReduce(data, ReduceKind::kMax, kWorld, Strategy::kAuto, 0, data);
  Drive<void*, void**>("cuStreamEndCapture", stream, &graph);
  Drive<void**, void*, unsigned long long>("cuGraphInstantiateWithFlags", &launched, graph, 0ull);
  gate.reset();
  rank.endpoint().Settle();
  data.Expect("what is captured is not run", [](size_t) { return 1; });
  if (stuck) {
    // One rank does not launch it.
    if (rank.id() != 0) Drive<void*, void*>("cuGraphLaunch", launched, stream);
    usleep(rank.id() == 0 ? 400000 : 0);
    try {
      if (rank.id() == 0) Fail(kind::kRuntime, "this rank leaves early");
      rank.endpoint().Settle();
    } catch (const Error&) {
      ProgramStreams().use(2, rank.id(), nullptr);
      throw;
    }
  }
  double sum = 1;
  for (int i = 0; i < 3; ++i) {
    Drive<void*, void*>("cuGraphLaunch", launched, stream);
    sum *= rank.num_ranks();
  }
  rank.endpoint().Settle();
  data.Expect("a graph, three times", [&](size_t) { return sum; });
  ProgramStreams().use(2, rank.id(), nullptr);
  SumWorld(rank);
}

}  // namespace tvm_ipc
