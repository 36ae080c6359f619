/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_exposed_buffers_stress.cc
 * \brief What ranks of several teams show, read and hide, under whatever sanitizer the build has.
 *
 *   test_exposed_buffers_stress [--operations N] [--seed N]
 *
 * In a round all ranks draw the same shows and hides, in three teams, with collectives of the same
 * teams in between; which of what is shown a rank looks at, and how often, it draws alone. What was
 * hidden is written at once, and given to somebody else. A rank fails at any place, with tensors of
 * all ranks shown; the session recovers, and numbers begin anew. Works go on meanwhile, and so does
 * another thread of each rank, in a team of its own.
 */
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/async_queue.h"
#include "expect.h"
#include "exposing_rank.h"
#include "ranks.h"

namespace tvm_ipc {
namespace {

enum Action { kExpose, kFail, kDrop, kDropped, kTooMany };

constexpr int kRanks = 4;
uint64_t operations = 2000;

std::vector<TeamId> TeamsOf(Rank& rank, uint32_t copy) {
  return {copy == 0 ? kWorld : TeamOf(rank.control(), {0, 1, 2, 3}, copy),
          copy == 0 ? kGroup : TeamOf(rank.control(), {3, 1, 0, 2}, copy),
          TeamOf(rank.control(), {2, 0, 3, 1}, copy)};
}

/*! \brief One thread of a rank, in teams of its own. */
void ExposeAndRelease(Rank& rank, uint64_t seed, uint32_t copy, uint64_t count, uint64_t fails_at) {
  Random random(seed + copy);
  std::vector<std::unique_ptr<RandomExposer>> exposers;
  for (TeamId team : TeamsOf(rank, copy)) {
    // The members of each group draw what they do alone; it is the same for all.
    exposers.push_back(std::make_unique<RandomExposer>(rank, team, seed + 100 * copy));
  }
  for (uint64_t i = 0; i < count; ++i) {
    if (i == fails_at) Fail(kind::kValue, "rank ", rank.id(), " was told to fail");
    exposers[Draw(random, exposers.size())]->Step(random);
  }
  for (auto& exposer : exposers) exposer->ReleaseAll(random);
}

/*! \brief The others read what one of them has dropped, until it fails. */
void Drop(Rank& rank, const Order& order) {
  Random random(order.seed);
  RandomExposer exposer(rank, kWorld, order.seed);
  for (int i = 0; i < 8; ++i) exposer.Expose(random);
  exposer.Meet();
  const bool drops = rank.id() == 0;
  if (drops) {
    exposer.DropAll();
    for (int i = 0; i < 50; ++i) {  // what it gets now is nothing that others look at
      const size_t bytes = 1000 * i;
      memset(Allocate(rank, bytes).get(), 0x44, bytes);
    }
  } else {
    exposer.CheckAll();
  }
  exposer.Meet();
  Fail(kind::kValue, "told to fail");
}

/*! \brief As many as there may be can be shown after a recovery, and one more is refused. */
void TooMany(Rank& rank, const Order& order) {
  Random random(order.seed);
  RandomExposer exposer(rank, kGroup, order.seed);
  for (uint32_t i = 0; i < kMaxExposed; ++i) exposer.Expose(random);
  if (order.action == kDropped) return exposer.ReleaseAll(random);
  exposer.Expose(random);
}

void Serve(Rank& rank, const Order& order) {
  if (order.action == kDrop) return Drop(rank, order);
  if (order.action == kDropped || order.action == kTooMany) return TooMany(rank, order);
  Random random(order.seed);
  const uint64_t fails_at = order.action == kFail ? random() % 100 : ~uint64_t{0};
  const bool is_told = rank.id() == static_cast<int>(random() % kRanks);
  const bool second = random() % 2 == 0;  // in which of the threads it fails
  const std::shared_ptr<Rank> shared = ShareCurrentRank();
  auto fails = [&](bool in_second) { return is_told && second == in_second ? fails_at : ~0ull; };
  std::string error;
  std::thread other([&] {
    ActFor(shared);
    try {
      ExposeAndRelease(rank, order.seed, 7, operations / 2, fails(true));
    } catch (const Error& caught) {
      error = caught.kind();
      rank.FailSession();
    }
    StopActing();
  });
  int32_t number = 0;
  std::shared_ptr<Request> request;
  try {
    request = rank.async_queue().Start("a work", [&rank, &number] {
      number = rank.id() + 1;
      return true;
    });
    ExposeAndRelease(rank, order.seed, 0, operations, fails(false));
  } catch (const Error&) {
    rank.FailSession();
    other.join();
    if (error == kind::kValue) Fail(kind::kValue, "its other thread was told to fail");
    throw;
  }
  other.join();
  if (!error.empty()) Fail(error == kind::kValue ? kind::kValue : kind::kPeer, "its other thread");
  request->Wait();
  EXPECT(number == rank.id() + 1, number);
}

void Run(uint64_t seed) {
  SessionServerOptions options;
  options.num_ranks = kRanks;
  options.arena_bytes = 64 << 20;
  options.timeout_seconds = 40;
  options.instruction_set = "auto";
  Ranks ranks(Ranks::Kind::kThreads, options, 2, Serve);
  Expect(ranks, kExpose, seed, "");
  for (int i = 0; i < 6; ++i) {
    Expect(ranks, kFail, seed + 10 * i, kind::kValue);
    Expect(ranks, kDropped, seed, "");
    Expect(ranks, kDrop, seed + i, kind::kValue);
    Expect(ranks, kTooMany, seed, kind::kRuntime);
  }
  Expect(ranks, kExpose, seed + 1, "");
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
  std::printf("%d ranks, %llu operations of each\npassed\n", tvm_ipc::kRanks,
              static_cast<unsigned long long>(tvm_ipc::operations));
  return 0;
}
