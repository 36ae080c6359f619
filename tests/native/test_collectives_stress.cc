/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_collectives_stress.cc
 * \brief Random sequences of all operations between ranks that are threads of one process, under
 *        whatever sanitizer the build has; `--processes` makes them processes instead.
 *
 *   test_collectives_stress [--processes] [--seconds S] [--seed N]
 *
 * A burst is a sequence of operations without a pause: the world, the groups and other teams in
 * turn, teams that overlap and teams in another order of ranks, all ways by size and strategy, in
 * place, inputs in arenas and elsewhere, point to point. Inputs are overwritten as soon as an
 * operation returns, blocks go back to the arena, and every result is checked. Between bursts ranks
 * fail or disagree, and the session recovers; steps and packets jump to the end of their range, so
 * that they wrap during a burst.
 *
 * That the test sees a missing order was tried on a copy of the sources, one change at a time.
 * ThreadSanitizer reports each of these within seconds:
 *   core/wait.cc    Publish stores relaxed; WaitFor loads relaxed
 *   core/collective_step_barrier.cc  Enter publishes the step before it writes the descriptor
 *   shm/team_operation.h      one staging buffer instead of two
 *   shm/allreduce.cc   Direct without the exit step; shm/data_movement_collectives.cc, Run without
 * it shm/point_to_point.cc  Send of an offset does not wait until it is taken and the results are
 * wrong without it, too, where Send fills a packet one too early.
 */
#include <algorithm>
#include <chrono>
#include <iterator>
#include <string>
#include <vector>

#include "ranks.h"
#include "stress_operation.h"

namespace tvm_ipc {
namespace {

enum Action { kBurst, kFailing, kDisagreeing, kWrap, kLarge };

constexpr int kOperations = 40;

/*! \brief Where ranks can disagree: about numbers, roots and sources. */
constexpr OperationKind kActsOfAll[] = {OperationKind::kAllReduce, OperationKind::kAllReduce,
                                        OperationKind::kPermute,   OperationKind::kBroadcast,
                                        OperationKind::kScatter,   OperationKind::kGather,
                                        OperationKind::kReduce};

template <typename T>
std::unique_ptr<Block> Do(Rank& rank, const Plan& plan, Random& own) {
  return Operation<T>(rank, plan, own).Do();
}

std::unique_ptr<Block> DoAnyType(Rank& rank, const Plan& plan, Random& own) {
  switch (plan.salt >> 62) {
    case 0:
      return Do<float>(rank, plan, own);
    case 1:
      return Do<int64_t>(rank, plan, own);
    default:
      return Do<int32_t>(rank, plan, own);
  }
}

/*! \brief What this rank does in its stead when it is the one that goes wrong. */
void GoWrong(Rank& rank, int action, Plan* plan) {
  if (action == kFailing) Fail(kind::kValue, "rank ", rank.id(), " was told to fail");
  if (plan->act != OperationKind::kAllReduce) {
    ++plan->distance;  // another root, or other sources
  } else if (plan->salt % 3 == 0) {
    plan->act = OperationKind::kBroadcast;
  } else {
    plan->count = plan->count * 3 + 1;  // often one that takes another way
  }
}

/*!
 * \brief Inputs that peers may still read, since there was no exit barrier. A later step of the
 *        same team, or of the world, says that they have read them.
 */
struct KeptInput {
  std::unique_ptr<Block> block;
  TeamId team;
};

/*!
 * \brief Teams beside the world and the groups, the same for all ranks; the last one is the rank's
 *        own of those into which all are divided.
 */
std::vector<TeamId> MakeTeams(Rank& rank, Random& random) {
  std::vector<int> all(rank.num_ranks());
  std::iota(all.begin(), all.end(), 0);
  std::vector<TeamId> teams;
  for (uint32_t copy = 0; copy < 4; ++copy) {
    std::shuffle(all.begin(), all.end(), random);
    const size_t size = 1 + Draw(random, all.size());
    teams.push_back(TeamOf(rank.control(), {all.begin(), all.begin() + size}, copy / 2));
  }
  std::vector<int64_t> division(all.begin(), all.end());
  size_t size = 1 + Draw(random, all.size());
  while (all.size() % size != 0) --size;
  division.insert(division.begin(), static_cast<int64_t>(size));
  teams.push_back(TeamIn(rank, division));
  const auto own = std::find(all.begin(), all.end(), rank.id()) - all.begin();
  const auto first = all.begin() + own / size * size;
  if (Members(rank, teams.back()) != std::vector<int>(first, first + size)) {
    Fail(kind::kRuntime, "the ranks were divided into teams of ", size, " in another way");
  }
  return teams;
}

bool IsMember(const Rank& rank, TeamId team) {
  const std::vector<int> ranks = Members(rank, team);
  return std::find(ranks.begin(), ranks.end(), rank.id()) != ranks.end();
}

void DoBurst(Rank& rank, const Order& order) {
  Random world(order.seed);
  Random group(order.seed + 1 + rank.id() / rank.group_size());
  Random own(order.seed * 1000 + rank.id());
  const int wrong_at = static_cast<int>(Draw(world, kOperations));
  const int wrong_rank = static_cast<int>(Draw(world, rank.num_ranks()));
  Random same(order.seed / 8);  // so that later bursts have some of the teams of earlier ones
  const std::vector<TeamId> teams = MakeTeams(rank, same);
  std::vector<KeptInput> held;
  for (int i = 0; i < kOperations; ++i) {
    const bool goes_wrong = order.action != kBurst && i == wrong_at;
    // Ranks can disagree only where they meet.
    const bool meets = goes_wrong && order.action == kDisagreeing;
    const uint64_t draw = meets ? 0 : Draw(world, 6);
    const bool in_group = draw < 2 && !meets && rank.group_size() > 1;
    const TeamId team = in_group ? kGroup : draw == 5 ? teams[Draw(world, teams.size())] : kWorld;
    Random& shared = in_group ? group : world;
    Plan plan = DrawPlan(shared, team, sizeof(float));
    if (goes_wrong && rank.id() == wrong_rank && !IsMember(rank, team)) plan.team = kWorld;
    if (!IsMember(rank, plan.team)) continue;
    if (meets) plan.act = kActsOfAll[plan.salt % std::size(kActsOfAll)];
    if (goes_wrong && rank.id() == wrong_rank) GoWrong(rank, order.action, &plan);
    Jitter(own);
    auto input = DoAnyType(rank, plan, own);
    if (plan.act != OperationKind::kExchange) {
      auto read = [&](KeptInput& h) { return plan.team == kWorld || h.team == plan.team; };
      for (KeptInput& h : held) {
        if (read(h)) h.block->Spoil(0xdd);
      }
      held.erase(std::remove_if(held.begin(), held.end(), read), held.end());
    }
    if (input != nullptr) held.push_back({std::move(input), plan.team});
    if (Draw(own, 64) == 0) rank.arena()->Trim();
  }
  // The last inputs go back to the arena here, and may be overwritten in the next burst.
  DoAnyType(rank, DrawPlan(world, kWorld, sizeof(float)), own);
  const Plan last{OperationKind::kAllReduce,
                  kWorld,
                  1,
                  ReduceKind::kSum,
                  Strategy::kAuto,
                  false,
                  BufferKind::kOwn,
                  false,
                  0,
                  0};
  Do<float>(rank, last, own);
}

/*! \brief Steps and packets are a few before the end of their range; all ranks are idle. */
void PrepareWrap(Rank& rank, const Order& order) {
  Random random(order.seed);
  for (int id = 0; id < kFirstTeam + static_cast<int>(kMaxTeams); ++id) {
    const TeamId team = static_cast<TeamId>(id);
    if (team >= kFirstTeam && FindTeam(rank.control(), team) == nullptr) break;
    const uint32_t step = 0u - static_cast<uint32_t>(Draw(random, 60));
    if (IsMember(rank, team)) rank.Begin(team).barrier.SkipTo(step);
  }
  const uint32_t packet = 0u - static_cast<uint32_t>(Draw(random, 12));
  for (int peer = 0; peer < rank.num_ranks(); ++peer) {
    rank.BeginSend(peer).packet = rank.BeginReceive(peer).packet = packet;
    Channel& channel = rank.control().channel(peer, rank.id());
    for (Slot& slot : channel.slot) slot.seq.store(packet, std::memory_order_relaxed);
    channel.taken.store(packet, std::memory_order_relaxed);
  }
}

/*! \brief The first operations of a session, all large: what the world stages stays in its buffers.
 */
void DoLarge(Rank& rank) {
  const size_t n = rank.num_ranks();
  const size_t part = kStageBytes / sizeof(int32_t) + 100;
  const ElementType type{0, 32, 1};
  std::vector<int32_t> data(n * part, 1), result(n * part);
  const Buffer send{data.data(), data.size(), type}, recv{result.data(), result.size(), type};
  const Buffer own{result.data(), part, type};
  SplitCounts parts(n *
                    n);  // each gives half a part more to itself, and half a part less to the next
  for (size_t i = 0; i < n * n; ++i) {
    parts[i] = part + (i / n == i % n ? part / 2 : 0) - ((i / n + 1) % n == i % n ? part / 2 : 0);
  }
  for (int round = 0; round < 2; ++round) {  // a step for each of two buffers
    On(rank).AllToAll(send, parts, kWorld, 0, recv);
    On(rank).AllToAll(send, SplitCounts(), kWorld, 0, recv);
    On(rank).ReduceScatter(send, ReduceKind::kMax, kWorld, 0, own);
    On(rank).Scatter(&send, 0, kWorld, 0, own);
    On(rank).AllGather(Buffer{data.data(), part, type}, kWorld, 0, recv);
    On(rank).AllReduce(send, ReduceKind::kMax, kWorld, Strategy::kTwoShot, 0, recv);
    On(rank).Broadcast(&send, 0, kWorld, 0, recv);
  }
  const uint8_t* next = rank.segments()->base(rank.id()) + 2 * kGroup * kStageBytes;
  const bool idle = std::all_of(next, next + 2 * kStageBytes, [](uint8_t b) { return b == 0; });
  if (!idle) Fail(kind::kRuntime, "the buffers of the group were written by the world");
}

void Serve(Rank& rank, const Order& order) {
  if (order.action == kWrap) return PrepareWrap(rank, order);
  if (order.action == kLarge) return DoLarge(rank);
  DoBurst(rank, order);
}

void RunRound(Ranks& ranks, int action, uint64_t seed) {
  const std::string expected = action == kFailing       ? kind::kValue
                               : action == kDisagreeing ? kind::kMismatch
                                                        : "";
  bool found = expected.empty();
  for (const RankReport& report : ranks.Round(action, seed)) {
    found = found || report.kind == expected;
    if (report.kind == expected || (report.kind == kind::kPeer && !expected.empty())) continue;
    Die(Text("action ", action, " with seed ", seed, ": rank ", report.rank, ": ", report.kind,
             ": ", report.message));
  }
  if (!found) Die(Text("action ", action, " with seed ", seed, " ended without its error"));
}

struct WorldSize {
  int num_ranks;
  int num_groups;
};

int RunWorld(Ranks::Kind kind, const WorldSize& world, double seconds, uint64_t seed) {
  SessionServerOptions options;
  options.num_ranks = world.num_ranks;
  options.arena_bytes = 48 << 20;
  options.timeout_seconds = 100;
  // The portable code has no inline assembly or streaming stores that a sanitizer would miss.
  options.instruction_set = seed % 2 == 0 ? "portable" : "auto";
  Ranks ranks(kind, options, world.num_groups, Serve);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int rounds = 0;
  RunRound(ranks, kLarge, seed);
  while (std::chrono::steady_clock::now() < end || rounds < 4) {
    if (rounds % 5 == 1) RunRound(ranks, kWrap, seed);
    RunRound(ranks, kBurst, seed + rounds);
    if (world.num_ranks > 1) {
      if (rounds % 3 == 1) RunRound(ranks, kFailing, seed + rounds);
      if (rounds % 3 == 2) RunRound(ranks, kDisagreeing, seed + rounds);
    }
    ++rounds;
  }
  return rounds;
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  using namespace tvm_ipc;
  // Every fault of faults.py is found in it.
  double seconds = 7;
  uint64_t seed = 1;
  auto kind = Ranks::Kind::kThreads;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--processes") kind = Ranks::Kind::kProcesses;
    if (option == "--seconds" && i + 1 < argc) seconds = std::stod(argv[++i]);
    if (option == "--seed" && i + 1 < argc) seed = std::stoull(argv[++i]);
  }
  const WorldSize worlds[] = {{2, 1}, {4, 2}, {3, 1}, {8, 2}, {6, 3}, {2, 2}, {1, 1}};
  for (const WorldSize& world : worlds) {
    const int rounds = RunWorld(kind, world, seconds / 7, seed++);
    std::printf("%d ranks in %d groups: %d bursts of %d operations\n", world.num_ranks,
                world.num_groups, rounds, kOperations);
    std::fflush(stdout);
  }
  std::printf("passed\n");
  return 0;
}
