/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_threads_stress.cc
 * \brief Two threads of each rank in collectives of two teams at once, under whatever sanitizer
 *        the build has.
 *
 *   test_threads_stress [--operations N] [--seed N]
 *
 * In a round the worker's own thread and one that acts for its rank do a random sequence each: the
 * one in the world and in its group, the other one in teams of its own, of all ranks in another
 * order, and of some of them. Sequences of different threads interleave as they like. Between
 * rounds a thread fails at any place, all threads of all ranks hear of it, and the session
 * recovers; and threads that take the same turn are refused.
 */
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "expect.h"
#include "ranks.h"
#include "stress_operation.h"

namespace tvm_ipc {
namespace {

enum Action { kTwoThreads, kOneFails, kSameTeam, kFailWithHelper, kStale };

constexpr int kRanks = 4;
uint64_t operations = 1000;

/*! \brief A thread that acts for a rank, and what it ended in. */
class Helper {
 public:
  template <typename Function>
  explicit Helper(Function function)
      : thread_([this, function, rank = ShareCurrentRank()]() mutable {
          try {
            ActFor(std::move(rank));
            function(*CurrentRank());
          } catch (const Error& error) {
            error_ = std::make_unique<Error>(error);
          }
          StopActing();
        }) {}
  ~Helper() {
    if (thread_.joinable()) thread_.join();
  }
  /*! \brief Its error, if it had one. */
  const Error* Join() {
    thread_.join();
    return error_.get();
  }

 private:
  std::unique_ptr<Error> error_;
  std::thread thread_;
};

/*! \brief A random sequence in some teams; fails before an operation if that is not negative. */
void DoSequence(Rank& rank, uint64_t seed, uint64_t count, const std::vector<TeamId>& teams,
                bool messages, int64_t fails_at) {
  Random shared(seed);
  Random own(seed * 1000 + rank.id());
  for (uint64_t i = 0; i < count; ++i) {
    if (static_cast<int64_t>(i) == fails_at) {
      Fail(kind::kValue, "rank ", rank.id(), " was told to fail");
    }
    const TeamId team = teams[Draw(shared, teams.size())];
    Plan plan = DrawPlan(shared, team, sizeof(int32_t));
    plan.no_exit_barrier = false;
    if (plan.act == OperationKind::kExchange && !messages) plan.act = OperationKind::kAllReduce;
    const std::vector<int> ranks = Members(rank, team);
    if (std::find(ranks.begin(), ranks.end(), rank.id()) == ranks.end()) continue;
    Operation<int32_t>(rank, plan, own).Do();
  }
}

/*! \brief Teams of the second thread alone. */
std::vector<TeamId> OtherTeams(Rank& rank) {
  Control& control = rank.control();
  return {TeamOf(control, {2, 0, 3, 1}, 0), TeamOf(control, {0, 1, 2, 3}, 7),
          TeamOf(control, {3, 1, 0}, 0), TeamOf(control, {1, 2}, 0)};
}

void DoTwoThreads(Rank& rank, const Order& order) {
  Random random(order.seed);
  const int failing_rank = static_cast<int>(Draw(random, kRanks));
  const bool helper_fails = Draw(random, 2) == 0;
  const bool fails = order.action == kOneFails && rank.id() == failing_rank;
  const uint64_t count = order.action == kOneFails ? 60 : operations;
  const int64_t fails_at = fails ? static_cast<int64_t>(Draw(random, count)) : -1;
  Helper helper([&](Rank& same) {
    DoSequence(same, order.seed + 1, count, OtherTeams(same), true, helper_fails ? fails_at : -1);
  });
  // A worker's function that fails does not wait for its threads; here the destructor does, and
  // reports after that, or nobody would end the wait of the helper.
  const std::vector<TeamId> own_teams = {kWorld, kWorld, kGroup};
  try {
    DoSequence(rank, order.seed + 2, count, own_teams, false, helper_fails ? -1 : fails_at);
  } catch (const Error&) {
    rank.FailSession();
    throw;
  }
  if (const Error* error = helper.Join()) throw *error;
}

/*! \brief Whoever of two threads of rank 0 comes second to a team is refused, the other one is not.
 */
void DoSameTeam(Rank& rank, const Order& order) {
  static std::atomic<int> refused;
  const TeamId team = order.seed % 2 == 0 ? kWorld : OtherTeams(rank)[0];
  auto reduce = [&](Rank& same) {
    int32_t one = 1, sum = 0;
    const ElementType type{0, 32, 1};
    On(same).AllReduce(Buffer{&one, 1, type}, ReduceKind::kSum, team, Strategy::kDefault, 0,
                       Buffer{&sum, 1, type});
    EXPECT(sum == kRanks);
  };
  if (rank.id() != 0) {
    while (refused == 0) std::this_thread::yield();
    return reduce(rank);
  }
  refused = 0;
  auto try_to = [&](Rank& same) {
    try {
      reduce(same);
    } catch (const Error& error) {
      EXPECT(Contains(error.what(), "two threads of rank 0"), error.what());
      ++refused;
    }
  };
  Helper helper(try_to);
  try_to(rank);
  helper.Join();
  EXPECT(refused == 1, refused.load());
  refused = 0;
}

/*! \brief A thread that has acted since before an error has no part in what comes after it. */
void DoStale(Rank& rank, const Order& order) {
  static std::atomic<bool> acts, recovered;
  static std::unique_ptr<Helper> helper;
  if (rank.id() != 0) return;
  if (order.action == kFailWithHelper) {
    acts = recovered = false;
    helper = std::make_unique<Helper>([](Rank& same) {
      acts = true;
      while (!recovered) std::this_thread::yield();
      same.Begin(kWorld);
    });
    while (!acts) std::this_thread::yield();
    Fail(kind::kValue, "told to fail");
  }
  recovered = true;
  const Error* error = helper->Join();
  EXPECT(error != nullptr && Contains(error->what(), "has recovered"));
  helper.reset();
}

void Serve(Rank& rank, const Order& order) {
  if (order.action == kSameTeam) return DoSameTeam(rank, order);
  if (order.action >= kFailWithHelper) return DoStale(rank, order);
  DoTwoThreads(rank, order);
}

void Run(uint64_t seed) {
  SessionServerOptions options;
  options.num_ranks = kRanks;
  options.arena_bytes = 64 << 20;
  options.timeout_seconds = 100;
  options.instruction_set = seed % 2 == 0 ? "portable" : "auto";
  Ranks ranks(Ranks::Kind::kThreads, options, 2, Serve);
  for (int i = 0; i < 6; ++i) Expect(ranks, kOneFails, seed + 10 * i, kind::kValue);
  Expect(ranks, kTwoThreads, seed, "");
  for (int i = 0; i < 4; ++i) Expect(ranks, kSameTeam, i, "");
  Expect(ranks, kFailWithHelper, seed, kind::kValue);
  Expect(ranks, kStale, seed, "");
  for (int i = 0; i < 6; ++i) Expect(ranks, kOneFails, seed + 10 * i + 5, kind::kValue);
}

}  // namespace
}  // namespace tvm_ipc

namespace tvm_ipc {
namespace {

/*! \brief Threads that make the same teams and other ones at once agree on their ids. */
void MakeTeamsAtOnce() {
  constexpr uint32_t kTeams = 60;
  const auto control = std::make_unique<Control>();
  control->num_ranks = control->ranks_here = kRanks;
  std::vector<std::vector<int>> ids(3);
  std::atomic<int> begun{0};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ids.size(); ++i) {
    threads.emplace_back([&, i] {
      ++begun;
      while (begun != static_cast<int>(ids.size())) continue;
      for (uint32_t copy = 0; copy < kTeams; ++copy) {
        ids[i].push_back(TeamOf(*control, {0, 2}, copy));
        TeamOf(*control, {1, 3}, i * kTeams + copy % 20);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<int>& found : ids) EXPECT(found == ids[0]);
  EXPECT(control->num_teams == kTeams + 3 * 20, control->num_teams.load(), " teams");
}

void TestMakers() {
  for (int round = 0; round < 30; ++round) MakeTeamsAtOnce();
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
  tvm_ipc::TestMakers();
  tvm_ipc::Run(seed);
  std::printf("%d ranks, two threads each, %llu operations of a thread\npassed\n", tvm_ipc::kRanks,
              static_cast<unsigned long long>(tvm_ipc::operations));
  return 0;
}
