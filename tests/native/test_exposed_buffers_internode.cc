/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_exposed_buffers_internode.cc
 * \brief What ranks of several nodes show, over a double of the engine.
 *
 *   test_exposed_buffers_internode [<rounds> [<seed>]]
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
#include "exposing_rank.h"

namespace tvm_ipc {
namespace {

enum Action {
  kExpose,
  kFail,
  kTooMany,
  kDisagree,
  kOrder,
  kLate,
  kLateRelease,
  kTooLarge,
  kRequests
};

constexpr size_t kArena = 128 << 20;
const ElementType kInt{0, 32, 1};

/*! \brief Random shows in the world, a team across nodes and the group; `fails_at` ends it. */
void ExposeAndRelease(Rank& rank, uint64_t seed, uint64_t fails_at) {
  Random random(seed);
  std::vector<std::unique_ptr<RandomExposer>> exposers;
  for (TeamId team : {kWorld, static_cast<TeamId>(kFirstTeam), kGroup}) {
    exposers.push_back(std::make_unique<RandomExposer>(rank, team, seed, 200000));
  }
  for (uint64_t i = 0; i < 150; ++i) {
    if (i == fails_at) Fail(kind::kValue, "rank ", rank.id(), " was told to fail");
    exposers[Draw(random, exposers.size())]->Step(random);
  }
  for (auto& exposer : exposers) exposer->ReleaseAll(random);
  // All memory came back, that of errors before, too.
  const size_t used = rank.endpoint().heap()->stats().in_use;
  EXPECT(used == 0, used, " bytes of rank ", rank.id());
}

ExposedBuffer ExposedBufferOf(Rank& rank, size_t count) {
  std::vector<int32_t> data(count, rank.id());
  return rank.endpoint().Expose({data.data(), count, kInt}, kWorld, nullptr);
}

void LookAtAll(Rank& rank, ExposedBuffer& exposed) {
  for (int k = 1; k < rank.num_ranks(); ++k) {
    const auto* peer = static_cast<const int32_t*>(rank.endpoint().PeerView(exposed, k).data);
    EXPECT(peer[0] == (rank.id() + k) % rank.num_ranks());
  }
}

void Do(Rank& rank, const Order& order) {
  const bool last = rank.id() == rank.num_ranks() - 1;
  switch (order.action) {
    case kExpose:
      return ExposeAndRelease(rank, order.seed, ~uint64_t{0});
    case kFail:
      return ExposeAndRelease(rank, order.seed,
                              rank.id() == static_cast<int>(order.seed) % rank.num_ranks()
                                  ? order.seed * 31 % 150
                                  : ~uint64_t{0});
    case kTooMany: {
      std::vector<ExposedBuffer> exposed;
      for (uint32_t i = 0; i <= kMaxExposed; ++i) exposed.push_back(ExposedBufferOf(rank, 3));
      return;
    }
    case kDisagree: {
      ExposedBuffer exposed = ExposedBufferOf(rank, last ? 7 : 9);
      return LookAtAll(rank, exposed);
    }
    case kOrder: {  // of two tensors, the last rank shows the other one first
      ExposedBuffer first = ExposedBufferOf(rank, last ? 200000 : 100),
                    second = ExposedBufferOf(rank, last ? 100 : 200000);
      return rank.endpoint().Release(kWorld, {&first, &second});
    }
    case kLate: {
      if (last) return;
      ExposedBuffer exposed = ExposedBufferOf(rank, 200000);
      return LookAtAll(rank, exposed);
    }
    case kLateRelease: {
      if (last) return;
      ExposedBuffer exposed = ExposedBufferOf(rank, 200000);
      return rank.endpoint().Release(kWorld, {&exposed});
    }
    case kTooLarge:
    case kRequests: {  // refused before anything is read
      int32_t one = 0;
      const size_t bytes =
          order.action == kTooLarge ? rank.control().arena_bytes : 2100 * kMessageBytes;
      rank.endpoint().Expose({&one, bytes / sizeof(one), kInt}, kWorld, nullptr);
      return;
    }
  }
}

void MakeTeam(Cluster& cluster, int ranks) {
  std::vector<int> back;
  for (int i = ranks; i-- > 0;) back.push_back(i);
  EXPECT(cluster.controller().TeamOf(back, 0) == kFirstTeam);
}

void TestExposed(const std::vector<int>& sizes, uint64_t seed, uint64_t rounds) {
  int ranks = 0;
  for (int size : sizes) ranks += size;
  Cluster cluster(sizes, Do, {{}, 60, "mpi", false, kArena});
  EngineDouble engine(cluster.segments(), seed);
  MakeTeam(cluster, ranks);
  for (uint64_t i = 0; i < rounds; ++i) {
    const auto reports = cluster.Round(kExpose, seed + i);
    EXPECT(reports.empty(), "seed ", seed + i, ": ", ErrorsAsText(reports));
    if (i % 2 != 1) continue;
    const auto failed = cluster.Round(kFail, seed + i);
    EXPECT(Contains(ErrorsAsText(failed), "was told to fail"), ErrorsAsText(failed));
    for (const RankReport& one : failed) {
      EXPECT(one.kind == kind::kPeer || one.kind == kind::kValue, one.message);
    }
  }
  // What it has on the way is not there for ever: all of it came back.
  for (int action : {kTooMany, kDisagree, kOrder, kExpose}) {
    const std::string said = ErrorsAsText(cluster.Round(action, seed));
    const char* wanted[] = {"", "",
                            "tensor 65 needs the entry of tensor 1, which has not been released",
                            "disagree", "disagree"};
    EXPECT(Contains(said, wanted[action]) && said.empty() == (action == kExpose), said);
  }
}

/*! \brief A node that shows nothing is named when the time is over. */
void TestLate() {
  Cluster cluster({2, 1}, Do, {{}, kShortTimeout, "mpi", false, kArena});
  EngineDouble engine(cluster.segments(), 3);
  MakeTeam(cluster, 3);
  for (int action : {kLate, kLateRelease}) {
    const std::string said = ErrorsAsText(cluster.Round(action, 1));
    EXPECT(Contains(said, Text("waited ", kShortTimeout, " s for node b (rank 2) to ")), said);
    EXPECT_NO_ERROR(cluster.Round(kExpose, 5));
  }
}

/*! \brief What has no room says how much it needed. */
void TestRoom() {
  Cluster cluster({1, 1}, Do, {{}, 60, "mpi", false, kArena});
  EngineDouble engine(cluster.segments(), 3);
  MakeTeam(cluster, 2);
  std::string said = ErrorsAsText(cluster.Round(kTooLarge, 1));
  EXPECT(Contains(said, "expose of ") && Contains(said, "raise arena_limit"), said);
  EXPECT(Contains(said, " bytes for messages between nodes: "), said);
  said = ErrorsAsText(cluster.Round(kRequests, 1));
  EXPECT(Contains(said, "needs 4200 messages between nodes"), said);
  EXPECT(Contains(said, "release exposed tensors first, or expose fewer at a time"), said);
  EXPECT_NO_ERROR(cluster.Round(kExpose, 5));
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  using namespace tvm_ipc;
  const uint64_t rounds = argc > 1 ? std::stoull(argv[1]) : 6;
  uint64_t seed = argc > 2 ? std::stoull(argv[2]) : 1;
  for (const auto& sizes : std::vector<std::vector<int>>{{1, 1}, {2, 1}, {2, 2}, {1, 2, 3}}) {
    TestExposed(sizes, seed += 1000, rounds);
  }
  TestLate();
  TestRoom();
  std::printf("passed\n");
  return 0;
}
