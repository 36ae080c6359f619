/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_teams_of_nodes.cc
 * \brief On several nodes a team has one number, and its ranks one seat each, on all of them: who
 *        asks first, when, and where makes no difference.
 */
#include <algorithm>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cluster.h"
#include "core/teams.h"
#include "expect.h"

namespace tvm_ipc {
namespace {

constexpr int kRanks = 4;
constexpr int kTeamsOfRound = 12;

enum Action { kMake, kUse, kFill, kFail, kUnknown };

/*! \brief What ranks were told, by round and number in it: -1 where nobody asked yet. */
std::mutex told_mutex;
std::vector<std::vector<int>> told;

/*! \brief Team number i of a round. */
std::vector<int> Drawn(uint64_t seed, int i) {
  std::mt19937_64 random(seed * 100 + static_cast<uint64_t>(i));
  std::vector<int> ranks(kRanks);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::shuffle(ranks.begin(), ranks.end(), random);
  ranks.resize(1 + random() % kRanks);
  return ranks;
}

void ExpectRecord(const Rank& rank, TeamId id, const std::vector<int>& ranks, uint32_t copy) {
  const TeamRecord* record = FindTeam(rank, id);
  EXPECT(record != nullptr && record->size == ranks.size() && record->copy == copy);
  EXPECT(std::equal(ranks.begin(), ranks.end(), record->ranks));
}

/*! \brief What another thread of the rank asks for, meanwhile. */
void MakeOthers(const Rank& rank) {
  const std::vector<int> pair = {rank.id(), (rank.id() + 1) % kRanks};
  try {
    for (uint32_t copy = 500; copy < 503; ++copy) {
      ExpectRecord(rank, TeamOf(rank, pair, copy), pair, copy);
    }
  } catch (const Error& error) {
    EXPECT(error.kind() == std::string(kind::kPeer), error.what());
  }
}

void Make(const Rank& rank, uint64_t seed) {
  for (int i = 0; i < kTeamsOfRound; ++i) {
    const std::vector<int> ranks = Drawn(seed, i);
    if (std::find(ranks.begin(), ranks.end(), rank.id()) == ranks.end()) continue;
    const auto copy = static_cast<uint32_t>(seed % 3);
    TeamId id;
    if (i % 4 == 3) {  // as one of the teams into which the ranks are divided
      std::vector<int64_t> division = {static_cast<int64_t>(ranks.size())};
      division.insert(division.end(), ranks.begin(), ranks.end());
      id = TeamIn(rank, division);
      ExpectRecord(rank, id, ranks, 0);
    } else {
      id = TeamOf(rank, ranks, copy);
      ExpectRecord(rank, id, ranks, copy);
    }
    std::lock_guard<std::mutex> lock(told_mutex);
    int& known = told[seed][i];
    EXPECT(known == -1 || known == id, "team ", i, " has the numbers ", known, " and ", id);
    known = id;
  }
}

/*! \brief A collective of a team whose number the controller has just been given. */
void Use(Rank& rank, TeamId team) {
  EXPECT(rank.SizeOf(team) == 2);
  if (rank.id() < 2) return;
  float value = 3;
  const Buffer buffer{&value, 1, ElementType{2, 32, 1}};
  On(rank).AllReduce(buffer, ReduceKind::kSum, team, Strategy::kDefault, 0, buffer);
  EXPECT(value == 6);
}

/*! \brief Until no more teams of the first and the last rank fit. */
void Fill(const Rank& rank) {
  if (rank.id() != 0 && rank.id() != kRanks - 1) return;
  std::vector<TeamId> mine;
  const Error full = ErrorOf([&] {
    while (true) {
      const auto copy = static_cast<uint32_t>(1000 + mine.size());
      mine.push_back(TeamOf(rank, {0, kRanks - 1}, copy));
    }
  });
  EXPECT(full.kind() == std::string(kind::kRuntime));
  EXPECT(Contains(full.what(), Text("is already in ", kMaxTeamSlots - kFirstTeam, " teams")));
  EXPECT(TeamOf(rank, {0, kRanks - 1}, 1000) == mine[0]);
  std::lock_guard<std::mutex> lock(told_mutex);
  if (told[0].empty()) told[0].assign(mine.begin(), mine.end());
  EXPECT(std::equal(mine.begin(), mine.end(), told[0].begin(), told[0].end()));
}

void Do(Rank& rank, const Order& order) {
  switch (order.action) {
    case kMake: {
      std::thread other([&] { MakeOthers(rank); });
      Make(rank, order.seed);
      return other.join();
    }
    case kUse:
      return Use(rank, static_cast<TeamId>(order.seed));
    case kFill:
      return Fill(rank);
    case kFail:
      if (static_cast<uint64_t>(rank.id()) == order.seed % kRanks) Fail(kind::kValue, "chosen");
      return Make(rank, order.seed);
    default:
      EXPECT(rank.SizeOf(static_cast<TeamId>(4000)) == 0);
      EXPECT(Contains(ErrorOf([&] { rank.Begin(static_cast<TeamId>(4000)); }).what(),
                      "there is no team 4000"));
      EXPECT(Contains(ErrorOf([&] { TeamOf(rank, {0, kRanks}, 0); }).what(), "there is no rank 4"));
  }
}

/*! \brief All nodes have the same teams, which are those of the controller. */
void ExpectSame(Cluster& cluster, int nodes) {
  Control& first = cluster.node(0).segments()->control();
  const uint32_t count = first.num_teams.load();
  for (int node = 1; node < nodes; ++node) {
    Control& other = cluster.node(node).segments()->control();
    EXPECT(other.num_teams.load() == count);
    EXPECT(memcmp(first.teams, other.teams, count * sizeof(TeamRecord)) == 0);
    for (int r = 0; r < kRanks; ++r) EXPECT(first.num_team_slots(r) == other.num_team_slots(r));
  }
  for (uint32_t i = 0; i < count; ++i) {
    const TeamRecord& record = first.teams[i];
    const std::vector<int> ranks(record.ranks, record.ranks + record.size);
    EXPECT(cluster.controller().TeamOf(ranks, record.copy) == static_cast<int>(kFirstTeam + i));
  }
}

void TestNumbers(const std::vector<int>& sizes) {
  Cluster cluster(sizes, Do);
  told.assign(100, std::vector<int>(kTeamsOfRound, -1));
  for (uint64_t seed = 0; seed < 6; ++seed) {
    EXPECT_NO_ERROR(cluster.Round(kMake, seed));
    // What the ranks ask for as one of them fails, asked for again when all have recovered.
    const uint64_t failing = 10 + seed;
    EXPECT(cluster.Round(kFail, failing).size() >= 1);
    EXPECT_NO_ERROR(cluster.Round(kMake, failing));
  }
  EXPECT_NO_ERROR(cluster.Round(kUnknown, 0));  // and an answer, before which all was said
  ExpectSame(cluster, static_cast<int>(sizes.size()));
  for (uint32_t copy = 0; copy < 20; ++copy) {
    const TeamId team = cluster.controller().TeamOf({3, 2}, 100 + copy);
    EXPECT_NO_ERROR(cluster.Round(kUse, static_cast<uint64_t>(team)));
  }
  told[0].clear();
  EXPECT_NO_ERROR(cluster.Round(kFill, 0));
  EXPECT_NO_ERROR(cluster.Round(kUnknown, 0));
  ExpectSame(cluster, static_cast<int>(sizes.size()));
  const Error refused = ErrorOf([&] { cluster.node(0).TeamOf({0}, 9); });
  EXPECT(Contains(refused.what(), "only the controller's can"), refused.what());
}

/*! \brief Who asks ends with an error where no answer comes: at the deadline, or when a peer fails.
 */
void TestNoAnswer(bool fails) {
  SessionServerOptions options = NodeOptions({2, 1}, 0, {});
  options.timeout_seconds = fails ? 60 : 0.2;
  SessionServer server(options);  // which nobody has told of a controller
  const Invitation invitation = Invitation::Unpack(server.invitation());
  auto join = [&](int rank) { return Join(invitation, FindBackend("shm"), rank, 3, 1); };
  std::thread other([&] {
    const auto rank = join(1);
    EXPECT(server.worker_table().WaitJoined(30));
    usleep(10000);
    if (fails) rank->FailSession();
    while (server.worker_table().Report().left.empty()) usleep(1000);
  });
  if (const auto rank = join(0); true) {
    EXPECT(server.worker_table().WaitJoined(30));
    const Error error = ErrorOf([&] { TeamOf(*rank, {0, 2}, 0); });
    EXPECT(error.kind() == std::string(fails ? kind::kPeer : kind::kDeadline), error.what());
    const char* text =
        fails ? "the creation of a team was stopped: rank 1 "
              : "rank 0 waited 0.2 s for the controller to send a team to node a (ranks 0 to 1)";
    EXPECT(Contains(error.what(), text), error.what());
  }
  other.join();
}

}  // namespace
}  // namespace tvm_ipc

int main() {
  using namespace tvm_ipc;
  for (const auto& sizes : {std::vector<int>{2, 2}, {1, 1, 2}}) TestNumbers(sizes);
  for (bool fails : {false, true}) TestNoAnswer(fails);
  std::printf("teams have one number on all nodes\n");
  return 0;
}
