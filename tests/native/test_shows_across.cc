/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_shows_across.cc
 * \brief What ranks of several nodes show, over a double of the engine.
 *
 *   test_shows_across [<rounds> [<seed>]]
 *
 * All ranks draw the same shows and hides, in teams across nodes and inside of one, with
 * collectives in between; what is looked at each draws alone. What was hidden is written at once. A
 * rank fails at any place; the session recovers, and nothing of before arrives.
 */
#include <memory>
#include <string>
#include <vector>

#include "cluster.h"
#include "core/teams.h"
#include "engine_double.h"
#include "expect.h"
#include "shower.h"

namespace tvm_ipc {
namespace {

enum Action { kShow, kFail, kTooMany, kDisagree, kOrder, kLate, kLateHide, kTooLarge, kRequests };

constexpr size_t kArena = 128 << 20;
const ElementType kInt{0, 32, 1};

/*! \brief Random shows in the world, a team across nodes and the group; `fails_at` ends it. */
void ShowAndHide(Rank& rank, uint64_t seed, uint64_t fails_at) {
  Random random(seed);
  std::vector<std::unique_ptr<Shower>> showers;
  for (TeamId team : {kWorld, static_cast<TeamId>(kFirstTeam), kGroup}) {
    showers.push_back(std::make_unique<Shower>(rank, team, seed, 200000));
  }
  for (uint64_t i = 0; i < 150; ++i) {
    if (i == fails_at) Fail(kind::kValue, "rank ", rank.id(), " was told to fail");
    showers[Draw(random, showers.size())]->Step(random);
  }
  for (auto& shower : showers) shower->HideAll(random);
  // All memory came back, that of errors before, too.
  const size_t used = rank.endpoint().heap()->stats().in_use;
  EXPECT(used == 0, used, " bytes of rank ", rank.id());
}

Shown ShowOf(Rank& rank, size_t count) {
  std::vector<int32_t> data(count, rank.id());
  return rank.endpoint().Show({data.data(), count, kInt}, kWorld, nullptr);
}

void LookAtAll(Rank& rank, Shown& shown) {
  for (int k = 1; k < rank.num_ranks(); ++k) {
    const auto* peer = static_cast<const int32_t*>(rank.endpoint().Peer(shown, k).data);
    EXPECT(peer[0] == (rank.id() + k) % rank.num_ranks());
  }
}

void Do(Rank& rank, const Order& order) {
  const bool last = rank.id() == rank.num_ranks() - 1;
  switch (order.action) {
    case kShow:
      return ShowAndHide(rank, order.seed, ~uint64_t{0});
    case kFail:
      return ShowAndHide(rank, order.seed,
                         rank.id() == static_cast<int>(order.seed) % rank.num_ranks()
                             ? order.seed * 31 % 150
                             : ~uint64_t{0});
    case kTooMany: {
      std::vector<Shown> shown;
      for (uint32_t i = 0; i <= kMaxShown; ++i) shown.push_back(ShowOf(rank, 3));
      return;
    }
    case kDisagree: {
      Shown shown = ShowOf(rank, last ? 7 : 9);
      return LookAtAll(rank, shown);
    }
    case kOrder: {  // of two tensors, the last rank shows the other one first
      Shown first = ShowOf(rank, last ? 200000 : 100), second = ShowOf(rank, last ? 100 : 200000);
      return rank.endpoint().Hide(kWorld, {&first, &second});
    }
    case kLate: {
      if (last) return;
      Shown shown = ShowOf(rank, 200000);
      return LookAtAll(rank, shown);
    }
    case kLateHide: {
      if (last) return;
      Shown shown = ShowOf(rank, 200000);
      return rank.endpoint().Hide(kWorld, {&shown});
    }
    case kTooLarge:
    case kRequests: {  // refused before anything is read
      int32_t one = 0;
      const size_t bytes =
          order.action == kTooLarge ? rank.control().arena_bytes : 2100 * kMessageBytes;
      rank.endpoint().Show({&one, bytes / sizeof(one), kInt}, kWorld, nullptr);
      return;
    }
  }
}

std::string Said(const std::vector<RankReport>& reports) {
  std::string text;
  for (const RankReport& one : reports) {
    text += Text("rank ", one.rank, ": ", one.kind, ": ", one.message, "; ");
  }
  return text;
}

void MakeTeam(Cluster& cluster, int ranks) {
  std::vector<int> back;
  for (int i = ranks; i-- > 0;) back.push_back(i);
  EXPECT(cluster.controller().TeamOf(back, 0) == kFirstTeam);
}

void TestShows(const std::vector<int>& sizes, uint64_t seed, uint64_t rounds) {
  int ranks = 0;
  for (int size : sizes) ranks += size;
  Cluster cluster(sizes, Do, {{}, 60, "mpi", false, kArena});
  EngineDouble engine(cluster.segments(), seed);
  MakeTeam(cluster, ranks);
  for (uint64_t i = 0; i < rounds; ++i) {
    const auto reports = cluster.Round(kShow, seed + i);
    EXPECT(reports.empty(), "seed ", seed + i, ": ", Said(reports));
    if (i % 2 != 1) continue;
    const auto failed = cluster.Round(kFail, seed + i);
    EXPECT(Contains(Said(failed), "was told to fail"), Said(failed));
    for (const RankReport& one : failed) {
      EXPECT(one.kind == kind::kPeer || one.kind == kind::kValue, one.message);
    }
  }
  // What it has on the way is not there for ever: all of it came back.
  for (int action : {kTooMany, kDisagree, kOrder, kShow}) {
    const std::string said = Said(cluster.Round(action, seed));
    const char* wanted[] = {"", "", "tensor 65 needs the place of tensor 1, which is not hidden",
                            "disagree", "disagree"};
    EXPECT(Contains(said, wanted[action]) && said.empty() == (action == kShow), said);
  }
}

/*! \brief A node that shows nothing is named when the time is over. */
void TestLate() {
  Cluster cluster({2, 1}, Do, {{}, 0.5, "mpi", false, kArena});
  EngineDouble engine(cluster.segments(), 3);
  MakeTeam(cluster, 3);
  for (int action : {kLate, kLateHide}) {
    const std::string said = Said(cluster.Round(action, 1));
    EXPECT(Contains(said, "waited 0.5 s for node b (rank 2) to "), said);
    EXPECT(cluster.Round(kShow, 5).empty());
  }
}

/*! \brief What has no room says how much it needed. */
void TestRoom() {
  Cluster cluster({1, 1}, Do, {{}, 60, "mpi", false, kArena});
  EngineDouble engine(cluster.segments(), 3);
  MakeTeam(cluster, 2);
  std::string said = Said(cluster.Round(kTooLarge, 1));
  EXPECT(Contains(said, "show of ") && Contains(said, "raise arena_limit"), said);
  EXPECT(Contains(said, " bytes for what is on its way between nodes: "), said);
  said = Said(cluster.Round(kRequests, 1));
  EXPECT(Contains(said, "needs 4200 messages between nodes"), said);
  EXPECT(Contains(said, "hide what was shown before, or show less at a time"), said);
  EXPECT(cluster.Round(kShow, 5).empty());
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  using namespace tvm_ipc;
  const uint64_t rounds = argc > 1 ? std::stoull(argv[1]) : 6;
  uint64_t seed = argc > 2 ? std::stoull(argv[2]) : 1;
  for (const auto& sizes : std::vector<std::vector<int>>{{1, 1}, {2, 1}, {2, 2}, {1, 2, 3}}) {
    TestShows(sizes, seed += 1000, rounds);
  }
  TestLate();
  TestRoom();
  std::printf("passed\n");
  return 0;
}
