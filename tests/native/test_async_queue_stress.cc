/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_async_queue_stress.cc
 * \brief Works beside what a program does in the same teams, under whatever sanitizer the build
 *        has.
 *
 *   test_async_queue_stress [--operations N] [--seed N]
 *
 * In a round each rank posts a random sequence of collectives, as many at a time as it likes, does
 * another one itself meanwhile, and waits for works in any order, or never. A work or the program
 * fails at any place, all ranks hear of it, and the session recovers: works that were posted before
 * are not started after that.
 */
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "core/async_queue.h"
#include "expect.h"
#include "ranks.h"
#include "stress_operation.h"

namespace tvm_ipc {
namespace {

enum Action { kBoth, kRequestFails, kProgramFails, kLeftBehind, kAfterThat };

constexpr int kRanks = 4;
uint64_t operations = 400;

std::vector<TeamId> TeamsOf(Rank& rank) {
  return {kWorld, kGroup, TeamOf(rank.control(), {2, 0, 3, 1}, 0)};
}

Plan Draw(Random& random, const std::vector<TeamId>& teams) {
  Plan plan = DrawPlan(random, teams[random() % teams.size()], sizeof(int32_t));
  plan.no_exit_barrier = false;
  if (plan.act == OperationKind::kExchange)
    plan.act = OperationKind::kAllReduce;  // messages have no teams
  return plan;
}

/*! \brief What a worker's function does with an error of a work: it tells, and ends the session. */
std::function<bool()> Reporting(Rank& rank, std::function<void()> operation) {
  return [&rank, operation = std::move(operation)] {
    try {
      operation();
      return true;
    } catch (const Error& error) {
      rank.connection().Send(FrameType::kError, PackError(error.kind(), error.what(), ""));
      rank.FailSession();
      return false;
    }
  };
}

std::shared_ptr<Request> StartOperation(Rank& rank, Plan plan, uint64_t seed, bool fails) {
  auto operation = [&rank, plan, seed, fails]() mutable {
    if (fails) Fail(kind::kValue, "rank ", rank.id(), " was told to fail in a work");
    Random own(seed);
    plan.team = AsyncQueue::OfThisThread()->TeamFor(plan.team);
    Operation<int32_t>(rank, plan, own).Do();
  };
  return rank.async_queue().Start("a work", Reporting(rank, operation));
}

void DoBoth(Rank& rank, const Order& order) {
  Random random(order.seed);
  Random own(order.seed * 1000 + rank.id());
  const std::vector<TeamId> teams = TeamsOf(rank);
  const uint64_t count = order.action == kBoth ? operations : 40;
  const uint64_t fails_at = random() % count;
  const bool is_told = rank.id() == static_cast<int>(random() % kRanks);
  std::vector<std::shared_ptr<Request>> requests;
  for (uint64_t i = 0; i < count; ++i) {
    const bool fails = is_told && i == fails_at;
    requests.push_back(
        StartOperation(rank, Draw(random, teams), own(), fails && order.action == kRequestFails));
    if (fails && order.action == kProgramFails) Fail(kind::kValue, "the program was told to fail");
    const Plan plan = Draw(random, teams);
    if (random() % 2 == 0) Operation<int32_t>(rank, plan, own).Do();
    while (!requests.empty() && own() % 3 != 0) {  // in any order; some are dropped
      const size_t which = own() % requests.size();
      if (own() % 4 != 0) requests[which]->Wait();
      requests.erase(requests.begin() + which);
    }
  }
  for (const auto& request : requests) request->Wait();
}

/*! \brief Post more than is done when the rank fails; none of it is done later. */
void DoLeftBehind(Rank& rank, const Order& order) {
  static std::atomic<int> done;
  if (order.action == kAfterThat) {
    rank.Drain();
    EXPECT(done == 0, "works of before the error were done after it");
    return;
  }
  done = 0;
  auto blocked = std::make_shared<std::atomic<bool>>(false);
  if (rank.id() != 0) return;
  rank.async_queue().Start("a wait", Reporting(rank, [blocked] {
                             while (!*blocked) std::this_thread::yield();
                           }));
  std::vector<std::shared_ptr<Request>> requests;
  for (int i = 0; i < 5; ++i) {
    requests.push_back(rank.async_queue().Start("a count", Reporting(rank, [] { ++done; })));
  }
  rank.FailSession();
  *blocked = true;
  for (const auto& request : requests) {
    try {
      request->Wait();
      Die("a work was done though the session had failed");
    } catch (const Error& error) {
      EXPECT(Contains(error.what(), "a count, which was started asynchronously, failed"),
             error.what());
    }
  }
  Fail(kind::kValue, "told to fail");
}

void Serve(Rank& rank, const Order& order) {
  if (order.action >= kLeftBehind) return DoLeftBehind(rank, order);
  try {
    DoBoth(rank, order);
  } catch (const Error&) {
    rank.FailSession();
    rank.Drain();
    throw;
  }
}

void Run(uint64_t seed) {
  SessionServerOptions options;
  options.num_ranks = kRanks;
  options.arena_bytes = 64 << 20;
  options.timeout_seconds = 100;
  options.instruction_set = "auto";
  Ranks ranks(Ranks::Kind::kThreads, options, 2, Serve);
  Expect(ranks, kBoth, seed, "");
  for (int i = 0; i < 6; ++i) {
    Expect(ranks, kRequestFails, seed + 10 * i, kind::kValue);
    Expect(ranks, kProgramFails, seed + 10 * i, kind::kValue);
    Expect(ranks, kLeftBehind, seed, kind::kValue);
    Expect(ranks, kAfterThat, seed, "");
  }
  Expect(ranks, kBoth, seed + 1, "");
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  uint64_t seed = 1;
  for (int i = 1; i + 1 < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--operations") tvm_ipc::operations = std::stoull(argv[++i]);
    if (option == "--seed") seed = std::stoull(argv[++i]);
  }
  tvm_ipc::Run(seed);
  std::printf("%d ranks, %llu works of each\npassed\n", tvm_ipc::kRanks,
              static_cast<unsigned long long>(tvm_ipc::operations));
  return 0;
}
