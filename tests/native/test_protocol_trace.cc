/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_protocol_trace.cc
 * \brief Each way of an all-reduce does what the model of the protocol does, event by event:
 *        tests/model/traces.py writes the file that this is compared with.
 */
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "core/protocol_trace_test_hook.h"
#include "core/teams.h"
#include "expect.h"
#include "ranks.h"

namespace tvm_ipc {

namespace {

thread_local Rank* traced = nullptr;
thread_local std::string events;

enum Way { kEager, kDirect, kSliced, kInPlace, kRelayed, kWays };
constexpr const char* kNames[] = {"eager", "direct", "sliced", "in_place", "relayed"};
std::string lines[kWays][kMaxRanks];

/*! \brief An all-reduce that goes this way, in two pieces where there are pieces. */
void Go(Rank& rank, const Order& order) {
  const int way = order.action;
  const size_t n = static_cast<size_t>(rank.num_ranks());
  const size_t bytes = way == kEager    ? 512
                       : way == kDirect ? 16 << 10
                                        : 2 * kStageBytes * (way == kRelayed ? 1 : n);
  const size_t in = rank.arena()->Allocate(bytes), out = rank.arena()->Allocate(bytes);
  std::vector<uint8_t> own(bytes);
  const ElementType type{2, 32, 1};
  const Buffer send{way == kRelayed ? own.data() : rank.arena_base() + in, bytes / 4, type};
  const Buffer recv{way == kInPlace ? send.data : rank.arena_base() + out, bytes / 4, type};
  std::vector<int> ranks;
  for (size_t i = 0; i < n; ++i) ranks.push_back(static_cast<int>(i));
  const TeamId team =
      TeamOf(rank.control(), ranks, static_cast<uint32_t>(way));  // at its first step
  traced = &rank;
  events.clear();
  On(rank).AllReduce(send, ReduceKind::kMax, team,
                     way <= kDirect ? Strategy::kOneShot : Strategy::kTwoShot, 0, recv);
  traced = nullptr;
  lines[way][rank.id()] = Text(kNames[way], " ", n, " ", rank.id(), ": ", events);
  rank.arena()->Free(in, bytes);
  rank.arena()->Free(out, bytes);
}

std::string Traces() {
  std::string all;
  for (int n : {2, 3}) {
    SessionServerOptions options;
    options.num_ranks = n;
    options.arena_bytes = 16 << 20;
    Ranks ranks(Ranks::Kind::kThreads, options, 1, Go);
    for (int way = 0; way < kWays; ++way) {
      EXPECT_NO_ERROR(ranks.Round(way, 0));
      for (int rank = 0; rank < n; ++rank) all += lines[way][rank] + "\n";
    }
  }
  return all;
}

}  // namespace

void Trace(const char* what, int rank, uint32_t slot) {
  if (traced == nullptr) return;
  const std::string event = what;
  // What a rank reads of its own is in nobody's way.
  if (event.rfind("read", 0) == 0 && rank == traced->id()) return;
  events += Text(events.empty() ? "" : ", ", event, " ", rank, " ", slot);
}

}  // namespace tvm_ipc

int main() {
  std::ifstream file(TVM_IPC_TRACES);
  std::stringstream wanted;
  wanted << file.rdbuf();
  const std::string found = tvm_ipc::Traces();
  EXPECT(found == wanted.str(), "the native code does\n", found, "and the model\n", wanted.str());
  std::printf("passed\n");
  return 0;
}
