/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_internode.cc
 * \brief Collectives and messages of ranks on several nodes, over a double of the engine: every
 *        rank compares its bits with a reference, element by element; and nodes send no more bytes
 *        than they have to.
 *
 * `test_internode <rounds> [<seed>]` does so many random rounds on each layout of nodes.
 */
#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cluster.h"
#include "core/teams.h"
#include "engine_double.h"
#include "expect.h"
#include "internode_bytes.h"
#include "internode_operation.h"

namespace tvm_ipc {
namespace {

enum Action { kOperation, kSum, kDisagree, kLate, kFailIn, kBytes, kRoots, kAlone, kEachItsOwn };

/*! \brief The node of each rank. */
std::vector<int> NodesOf(const Rank& rank) {
  std::vector<int> nodes;
  for (int i = 0; i < rank.num_ranks(); ++i) nodes.push_back(rank.control().NodeOf(i));
  return nodes;
}

/*! \brief The only member of a node says its elements from where they lie: it stages none. */
void OnlyMember(Rank& rank) {
  const size_t n = static_cast<size_t>(rank.num_ranks()), count = n * 100003;
  const ElementType type{2, 32, 1};
  for (bool in_parts : {false, true}) {
    std::vector<float> ones(count, 1), out(in_parts ? count / n : count);
    const Buffer send{ones.data(), count, type}, recv{out.data(), out.size(), type};
    if (in_parts) {
      On(rank).ReduceScatter(send, ReduceKind::kSum, kWorld, 0, recv);
    } else {
      On(rank).AllReduce(send, ReduceKind::kSum, kWorld, Strategy::kAuto, 0, recv);
    }
    for (float one : out) EXPECT(one == static_cast<float>(n));
  }
  for (size_t buffer : {0, 1}) {
    const uint8_t* elements = rank.segments()->base(rank.id()) + buffer * kStageBytes;
    EXPECT(std::count(elements, elements + kStageBytes / 2, 0) == kStageBytes / 2);
  }
}

/*! \brief Calls of collectives that all differ. */
class Calls {
 public:
  static constexpr uint64_t kCount = 20;

  explicit Calls(Rank& rank) : rank_(rank) {}

  void Run(uint64_t call) {
    const bool whole = call == 15;
    const size_t n = static_cast<size_t>(rank_.num_ranks());
    const size_t count = (call == 16 ? 70000 : call == 17 ? 16 : 8) * n;
    const ElementType type = whole ? ElementType{0, 32, 1} : ElementType{2, 32, 1};
    send_.assign(count * n, 1);
    recv_.assign(count * n, 0);
    const Buffer send{send_.data(), count, type}, recv{recv_.data(), count, type};
    const Buffer all{recv_.data(), count * n, type}, from_all{send_.data(), count * n, type};
    const Buffer part{recv_.data(), count / n, type};
    const int last = rank_.num_ranks() - 1;
    auto at = [&](int root) { return rank_.id() == root; };
    Endpoint& endpoint = rank_.endpoint();
    switch (call) {
      case 0:
      case 15:
      case 16:
      case 17:
        return On(endpoint).AllReduce(send, ReduceKind::kSum, kWorld, Strategy::kAuto, 0, recv);
      case 1:
        return On(endpoint).AllReduce(send, ReduceKind::kMax, kWorld, Strategy::kAuto, 0, recv);
      case 2:
        return On(endpoint).ReduceScatter(send, ReduceKind::kSum, kWorld, 0, part);
      case 3:
        return On(endpoint).Reduce(send, ReduceKind::kSum, 0, kWorld, 0, at(0) ? &recv : nullptr);
      case 4:
        return On(endpoint).Reduce(send, ReduceKind::kSum, last, kWorld, 0,
                                   at(last) ? &recv : nullptr);
      case 5:
        return On(endpoint).AllGather(send, kWorld, 0, all);
      case 6:
        return On(endpoint).Broadcast(at(0) ? &send : nullptr, 0, kWorld, 0, recv);
      case 7:
        return On(endpoint).Broadcast(at(last) ? &send : nullptr, last, kWorld, 0, recv);
      case 8:
        return On(endpoint).Scatter(at(0) ? &from_all : nullptr, 0, kWorld, 0, recv);
      case 9:
        return On(endpoint).Scatter(at(last) ? &from_all : nullptr, last, kWorld, 0, recv);
      case 10:
        return On(endpoint).Gather(send, 0, kWorld, 0, at(0) ? &all : nullptr);
      case 11:
        return On(endpoint).Gather(send, last, kWorld, 0, at(last) ? &all : nullptr);
      case 12:
        return On(endpoint).AllToAll(send, {}, kWorld, 0, recv);
      case 13:
        return On(endpoint).Permute(send, Shifted(1), kWorld, 0, recv);
      case 14:
        return On(endpoint).Permute(send, Shifted(0), kWorld, 0, recv);
      case 18:
        return On(endpoint).Broadcast(at(0) ? &from_all : nullptr, 0, kWorld, 0, all);
      default:
        return On(endpoint).Permute(send, std::vector<int64_t>(n, -1), kWorld, 0, recv);
    }
  }

 private:
  Sources Shifted(int64_t by) const {
    const int64_t n = rank_.num_ranks();
    std::vector<int64_t> sources;
    for (int64_t i = 0; i < n; ++i) sources.push_back((i + by) % n);
    return Sources(sources);
  }

  Rank& rank_;
  std::vector<float> send_, recv_;
};

void Do(Rank& rank, const Order& order) {
  const InternodeOperation operation(rank, order.seed);
  const int last = rank.num_ranks() - 1;
  switch (order.action) {
    case kOperation:
      return operation.Run();
    case kSum:
      return operation.Sum(order.seed);
    case kDisagree:
      return operation.Sum(rank.id() == last ? 7 : 9);
    case kLate:
      if (rank.id() == last) return;
      return operation.Sum(1 << 20);
    case kBytes:
      return InternodeBytes(order.seed, NodesOf(rank)).Run(rank, kFirstTeam);
    case kAlone:
      return OnlyMember(rank);
    case kRoots: {
      float one = 1;
      const Buffer buffer{&one, 1, {2, 32, 1}};
      return On(rank).Reduce(buffer, ReduceKind::kSum, rank.id(), kWorld, 0, &buffer);
    }
    case kEachItsOwn: {
      uint64_t call = order.seed;  // a digit for each rank
      for (int i = 0; i < rank.id(); ++i) call /= Calls::kCount;
      return Calls(rank).Run(call % Calls::kCount);
    }
    case kFailIn:
      if (rank.id() == static_cast<int>(order.seed) % rank.num_ranks()) {
        if (order.seed % 3 == 0) operation.Run();
        Fail(kind::kValue, "enough");
      }
      operation.Run();
      while (true) operation.Sum(1 << 18);
  }
}

std::string SizesText(const std::vector<int>& sizes) {
  std::string text;
  for (int size : sizes) text += std::to_string(size) + " ";
  return text;
}

/*! \brief The controller makes teams, whose numbers the ranks use. */
void MakeTeams(Cluster& cluster, int n) {
  std::vector<int> odd, back;
  for (int i = 0; i < n; ++i) {
    back.insert(back.begin(), i);
    if (i % 2 == 1 || i == n - 1) odd.push_back(i);
  }
  EXPECT(cluster.controller().TeamOf(back, 0) == kFirstTeam);
  EXPECT(cluster.controller().TeamOf(odd, 0) == kFirstTeam + 1);
  EXPECT(cluster.controller().TeamOf({n - 1, 0}, 1) == kFirstTeam + 2);
}

void TestOperations(const std::vector<int>& sizes, bool flat, uint64_t seed, uint64_t rounds) {
  Cluster cluster(sizes, Do, {{}, 60, "mpi", flat});
  EngineDouble engine(cluster.segments(), seed);
  int n = 0;
  for (int size : sizes) n += size;
  MakeTeams(cluster, n);
  for (uint64_t i = 0; i < rounds; ++i) {
    for (const RankReport& report : cluster.Round(kOperation, seed + i)) {
      EXPECT(false, "nodes of ", SizesText(sizes), ", seed ", seed + i, ": rank ", report.rank,
             ": ", report.kind, ": ", report.message);
    }
    if (i % 8 != 7) continue;
    bool found = false;
    for (const RankReport& report : cluster.Round(kFailIn, seed + i)) {
      found = found || report.message == "enough";
      EXPECT(report.kind == kind::kPeer || report.message == "enough", report.kind, ": ",
             report.message);
    }
    EXPECT(found, "the error is lost");
  }
}

/*! \brief A node sends what others want, once. */
void TestBytes(const std::vector<int>& sizes, bool flat) {
  Cluster cluster(sizes, Do, {{}, 60, "mpi", flat});
  EngineDouble engine(cluster.segments(), 3, 0);
  std::vector<int> nodes;
  for (size_t node = 0; node < sizes.size(); ++node) {
    nodes.insert(nodes.end(), static_cast<size_t>(sizes[node]), static_cast<int>(node));
  }
  MakeTeams(cluster, static_cast<int>(nodes.size()));
  for (uint64_t seed = 0; seed < InternodeBytes::kCases; ++seed) {
    EXPECT_NO_ERROR(cluster.Round(kBytes, seed));
    InternodeBytes(seed, nodes).Expect(engine.TakeSent(), flat);
  }
}

void TestOnlyMembers() {
  for (const auto& sizes : std::vector<std::vector<int>>{{1, 1}, {1, 1, 1}}) {
    for (bool flat : {false, true}) {
      Cluster cluster(sizes, Do, {{}, 60, "mpi", flat});
      EngineDouble engine(cluster.segments(), 3);
      MakeTeams(cluster, static_cast<int>(sizes.size()));
      EXPECT_NO_ERROR(cluster.Round(kAlone, 0));
    }
  }
}

/*! \brief Ranks of several nodes that call different things are told which. */
void TestDisagreement() {
  Cluster cluster({1, 2}, Do, {{}, 60, "mpi"});
  EngineDouble engine(cluster.segments(), 3);
  MakeTeams(cluster, 3);
  for (int i = 0; i < 3; ++i) {
    bool found = false;
    for (const RankReport& report : cluster.Round(kDisagree, 1)) {
      found = found || report.kind == kind::kMismatch;
      EXPECT(report.kind == kind::kPeer || report.kind == kind::kMismatch, report.message);
    }
    EXPECT(found, "nobody sees that they disagree");
    EXPECT_NO_ERROR(cluster.Round(kSum, 5000));
  }
  Cluster apart({1, 1}, Do, {{}, 60, "mpi"});
  EngineDouble other(apart.segments(), 3);
  MakeTeams(apart, 2);
  bool found = false;
  for (const RankReport& report : apart.Round(kDisagree, 1)) {
    found = found || report.kind == kind::kMismatch;
    EXPECT(report.kind == kind::kPeer ||
               (Contains(report.message, "the nodes disagree: rank ") &&
                Contains(report.message, "of node a (rank 0) called allreduce(sum, ") &&
                Contains(report.message, "of node b (rank 1) called allreduce(sum, ") &&
                Contains(report.message, " of 7 x float32") &&
                Contains(report.message, " of 9 x float32")),
           report.message);
  }
  EXPECT(found, "nobody sees that the nodes disagree");
  found = false;
  for (const RankReport& report : apart.Round(kRoots, 1)) {
    found = found || report.kind == kind::kMismatch;
    EXPECT(report.kind == kind::kPeer || report.kind == kind::kMismatch, report.message);
  }
  EXPECT(found, "nobody sees that each node thinks the result is for it");
}

/*! \brief Expect that ranks which make these calls are told soon that they disagree. */
void ExpectMismatch(Cluster& cluster, const std::vector<uint64_t>& calls) {
  std::string text;
  uint64_t seed = 0, factor = 1;
  for (uint64_t call : calls) {
    seed += call * factor;
    factor *= Calls::kCount;
    text += Text(" ", call);
  }
  bool found = false;
  for (const RankReport& report : cluster.Round(kEachItsOwn, seed)) {
    EXPECT(report.kind == kind::kPeer || report.kind == kind::kMismatch, "calls", text, ": ",
           report.kind, ": ", report.message);
    if (report.kind != kind::kMismatch) continue;
    found = true;
    const size_t first = report.message.find(" called ");
    EXPECT(first != std::string::npos &&
               report.message.find(" called ", first + 1) != std::string::npos,
           report.message);
  }
  EXPECT(found, "nobody sees that the calls", text, " differ");
}

/*!
 * \brief Each collective against each other one, and the same with another root, kind, type or
 *        size: long before the deadline all hear of both calls.
 */
void TestEachAgainstEach(const std::vector<int>& sizes, uint64_t seed, uint64_t rounds) {
  constexpr double kDeadline = 30;
  Cluster cluster(sizes, Do, {{}, kDeadline, "mpi"});
  EngineDouble engine(cluster.segments(), seed);
  size_t n = 0;
  for (int size : sizes) n += static_cast<size_t>(size);
  MakeTeams(cluster, static_cast<int>(n));
  for (uint64_t call = 0; call < Calls::kCount; ++call) {
    uint64_t all = 0;
    for (size_t i = 0; i < n; ++i) all = all * Calls::kCount + call;
    EXPECT_NO_ERROR(cluster.Round(kEachItsOwn, all));
  }
  using Clock = std::chrono::steady_clock;
  std::minstd_rand random(static_cast<uint32_t>(seed));
  const Clock::time_point begin = Clock::now();
  uint64_t count = 0;
  for (uint64_t one = 0; one < Calls::kCount; ++one) {
    for (uint64_t other = 0; other < Calls::kCount; ++other) {
      if (one == other) continue;
      std::vector<uint64_t> calls(n, one);
      calls[random() % n] = other;
      ExpectMismatch(cluster, calls);
      ++count;
    }
  }
  for (uint64_t i = 0; i < rounds; ++i, ++count) {
    std::vector<uint64_t> calls(n);
    for (uint64_t& call : calls) call = random() % Calls::kCount;
    calls[0] = (calls[1] + 1) % Calls::kCount;
    ExpectMismatch(cluster, calls);
  }
  const double each =
      std::chrono::duration<double>(Clock::now() - begin).count() / static_cast<double>(count);
  EXPECT(each < kDeadline / 30, "a mismatch takes ", each, " s");
  EXPECT_NO_ERROR(cluster.Round(kSum, 5000));
}

/*! \brief A node that does not come is named when the time is over. */
void TestLate() {
  Cluster cluster({2, 1}, Do, {{}, kShortTimeout, "mpi"});
  EngineDouble engine(cluster.segments(), 3);
  MakeTeams(cluster, 3);
  bool found = false;
  for (const RankReport& report : cluster.Round(kLate, 1)) {
    found = found || Contains(report.message,
                              Text("waited ", kShortTimeout, " s for node b (rank 2) to send"));
    EXPECT(report.kind == kind::kPeer || report.kind == kind::kDeadline, report.message);
  }
  EXPECT(found, "nobody says that node b is late");
  EXPECT_NO_ERROR(cluster.Round(kSum, 5000));
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  using namespace tvm_ipc;
  const uint64_t rounds = argc > 1 ? std::stoull(argv[1]) : 60;
  uint64_t seed = argc > 2 ? std::stoull(argv[2]) : 1;
  for (const auto& sizes :
       std::vector<std::vector<int>>{{1, 1}, {2, 1}, {2, 2}, {1, 2, 3}, {1, 1, 2, 1}}) {
    for (bool flat : {false, true}) TestOperations(sizes, flat, seed += 10000, rounds);
  }
  for (const auto& sizes : std::vector<std::vector<int>>{{2, 2}, {1, 2, 3}, {1, 1, 2, 1}}) {
    for (bool flat : {false, true}) TestBytes(sizes, flat);
  }
  TestOnlyMembers();
  TestDisagreement();
  for (const auto& sizes : std::vector<std::vector<int>>{{1, 1}, {1, 1, 1}, {2, 1}, {2, 3}}) {
    TestEachAgainstEach(sizes, ++seed, rounds);
  }
  TestLate();
  std::printf("passed\n");
  return 0;
}
