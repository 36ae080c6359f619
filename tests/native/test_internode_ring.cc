/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_internode_ring.cc
 * \brief The wire: messages of one tag arrive whole and in order, whatever others do, from any
 *        number of threads; waits end with an error that names the node; after a recovery nothing
 *        of what was on its way arrives.
 *
 * `test_internode_ring [<rounds>]` does so many rounds on each layout of nodes.
 */
#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cluster.h"
#include "core/internode_request_queue.h"
#include "engine_double.h"
#include "expect.h"

namespace tvm_ipc {
namespace {

enum Action { kSwap, kThreads, kFail, kLate };

/*! \brief By rank, as its backend would have it. */
std::unique_ptr<InternodeRing> rings[kMaxRanks];

InternodeRing& RingOf(Rank& rank) {
  std::unique_ptr<InternodeRing>& ring = rings[rank.id()];
  if (ring == nullptr) ring = std::make_unique<InternodeRing>(rank);
  return *ring;
}

/*! \brief Those of another cluster. */
void Forget() {
  for (auto& ring : rings) ring.reset();
}

Descriptor Mine() {
  Descriptor mine;
  mine.op = "swap";
  return mine;
}

uint8_t Byte(uint64_t seed, int from, int to, size_t number, size_t at) {
  return static_cast<uint8_t>(seed * 31 + from * 7 + to * 13 + number * 5 + at + at / 251);
}

size_t Length(uint64_t seed, int from, int to, size_t number) {
  static const size_t lengths[] = {0, 1, 64, 1000, 65537, kMessageBytes, kRingBuffer};
  return lengths[(seed + from * 3 + to * 5 + number * number) % 7];
}

/*! \brief Every rank sends some messages to every rank of other nodes, with one tag to each; half
 *         of the seeds send in turn. */
void Swap(Rank& rank, uint64_t seed, int team, size_t messages) {
  struct InFlight {
    int peer;
    size_t number, buffer;
    bool sends;
    RingTicket ticket;
  };
  const Control& control = rank.control();
  const int me = rank.id();
  const RingPhase phase = seed % 2 == 0 ? kFirstPhase : kExposePhase;
  std::minstd_rand random(static_cast<uint32_t>(seed * 64 + me + 1));
  // For all messages with one number, so that whoever waits has posted what others wait for.
  const size_t some = 2 * static_cast<size_t>(rank.num_ranks());
  RingLease use(RingOf(rank), rank.CheckSession(), nullptr, Mine(), some, some);
  std::vector<size_t> free;
  for (size_t i = 0; i < use.buffers(); ++i) free.push_back(i);
  std::deque<InFlight> in_flight;
  std::vector<uint8_t> seen;
  auto end = [&](size_t which) {
    const InFlight one = in_flight[which];
    const size_t bytes = use.Await(one.ticket);
    const int from = one.sends ? me : one.peer, to = one.sends ? one.peer : me;
    EXPECT(bytes == Length(seed, from, to, one.number), bytes, " bytes of message ", one.number);
    for (size_t at = 0; !one.sends && at < bytes; ++at) {
      EXPECT(use.buffer(one.buffer)[at] == Byte(seed, from, to, one.number, at), "byte ", at);
    }
    free.push_back(one.buffer);
    in_flight.erase(in_flight.begin() + static_cast<ptrdiff_t>(which));
  };
  auto start = [&](int peer, size_t number, bool sends) {
    const size_t buffer = free.back();
    free.pop_back();
    const int node = control.NodeOf(peer);
    RingTicket ticket;
    if (sends) {
      const size_t bytes = Length(seed, me, peer, number);
      for (size_t at = 0; at < bytes; ++at) {
        use.buffer(buffer)[at] = Byte(seed, me, peer, number, at);
      }
      ticket = use.Send(node, RingTag(team, me, peer, phase), buffer, 0, bytes);
    } else {
      ticket = use.Receive(node, RingTag(team, peer, me, phase), buffer);
    }
    in_flight.push_back({peer, number, buffer, sends, ticket});
    use.WakeEngine();
  };
  for (size_t number = 0; number < messages; ++number) {
    for (int shift = 1; shift < rank.num_ranks(); ++shift) {
      const int to = (me + shift) % rank.num_ranks();
      const int from = (me + rank.num_ranks() - shift) % rank.num_ranks();
      for (bool sends : {true, false}) {
        if (control.IsHere(sends ? to : from)) continue;
        // Sends end when others receive, so what was posted first is awaited first.
        while (free.empty()) end(0);
        start(sends ? to : from, number, sends);
      }
    }
    if (random() % 3 == 0 && !in_flight.empty()) {
      const size_t any = random() % in_flight.size();
      if (use.Done(in_flight[any].ticket)) end(any);
    }
  }
  while (!in_flight.empty()) end(0);
}

void Do(Rank& rank, const Order& order) {
  const int last = rank.num_ranks() - 1;
  switch (order.action) {
    case kSwap:
      return Swap(rank, order.seed, kWorld, 6);
    case kThreads: {
      const std::shared_ptr<Rank> shared = ShareCurrentRank();
      std::vector<std::thread> threads;
      for (int i = 0; i < 3; ++i) {
        threads.emplace_back([&, i] {
          ActFor(shared);
          Swap(rank, order.seed + static_cast<uint64_t>(i), 2 + i, 4);
          StopActing();
        });
      }
      for (std::thread& thread : threads) thread.join();
      return;
    }
    case kFail:
      if (rank.id() == static_cast<int>(order.seed) % rank.num_ranks()) {
        Swap(rank, order.seed, 9, 0);
        Fail(kind::kValue, "enough");
      }
      Swap(rank, order.seed, kWorld, 4);  // some of it arrives, some never does
      return;
    case kLate: {
      RingLease use(RingOf(rank), rank.CheckSession(), nullptr, Mine(), 1, 1);
      if (rank.id() == 0) use.Await(use.Receive(1, RingTag(kWorld, last, 0, kFirstPhase), 0));
      return;
    }
  }
}

void TestMessages(const std::vector<int>& sizes, uint64_t seed, uint64_t rounds) {
  Forget();
  Cluster cluster(sizes, Do);
  EngineDouble engine(cluster.segments(), seed);
  auto round = [&](int action, uint64_t number) {
    for (const RankReport& report : cluster.Round(action, number)) {
      EXPECT(false, report.kind, ": ", report.message);
    }
  };
  for (uint64_t i = 0; i < rounds; ++i) {
    round(kSwap, seed + i);
    bool found = false;
    for (const RankReport& report : cluster.Round(kFail, seed + i)) {
      found = found || report.message == "enough";
      EXPECT(report.kind == kind::kPeer || report.message == "enough", report.message);
    }
    EXPECT(found, "the error is lost");
    round(kSwap, seed + i + 100);
    round(kThreads, seed + i);
  }
}

/*! \brief A node that sends nothing is named, and what it had not sent does not come later. */
void TestLate() {
  Forget();
  Cluster cluster({1, 2}, Do, {{}, kShortTimeout});
  EngineDouble engine(cluster.segments(), 1);
  bool found = false;
  for (const RankReport& report : cluster.Round(kLate, 0)) {
    found = found || report.rank == 0;
    EXPECT(report.kind == kind::kDeadline &&
               Contains(report.message, Text("waited ", kShortTimeout,
                                             " s for node b (ranks 1 to 2) to send a message")),
           report.message);
  }
  EXPECT(found, "rank 0 waits for nothing");
  EXPECT_NO_ERROR(cluster.Round(kSwap, 3));
}

/*! \brief An engine sleeps for a part of the time between two ends, once it knows that, and not
 * long. */
void TestTurnBackoff() {
  const auto wait = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
  engine::SequentialBackoff sequential_backoff;
  EXPECT(sequential_backoff.Length().count() == 0);
  sequential_backoff.Ended();
  wait();
  sequential_backoff.Interrupted();
  sequential_backoff.Ended();
  EXPECT(sequential_backoff.Length().count() == 0, "the time of something else counts");
  wait();
  sequential_backoff.Ended();
  EXPECT(sequential_backoff.Length() == std::chrono::microseconds(200),
         sequential_backoff.Length().count());
  for (int i = 0; i < 1000; ++i) sequential_backoff.Ended();
  EXPECT(sequential_backoff.Length().count() == 0, "messages that end at once wait for a sleep");
}

/*! \brief Sessions of one machine have no wire, and those of several have room for all of it. */
void TestLayout() {
  SessionServer one(Options(2));
  EXPECT(one.segments() == nullptr);
  SessionServer node(NodeOptions({1, 2}, 1, {}));
  const Control& control = node.segments()->control();
  EXPECT(control.ring_bytes == RingBytes(3));
  EXPECT(ArenaStart(control) == RingStart(3) + control.ring_bytes);
  EXPECT(node.segments()->base(0) == nullptr && node.segments()->base(2) != nullptr);
  EXPECT(node.segments()->segment_bytes() == ArenaStart(control) + control.arena_bytes);
  EXPECT(kRingTable + RingBuffers(3) * kRingBuffer <= RingBytes(3));
  EXPECT(kLargestTag == 67141631 && kLargestTag < (1 << 28) - 1, kLargestTag);
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  using namespace tvm_ipc;
  const uint64_t rounds = argc > 1 ? std::stoull(argv[1]) : 4;
  TestLayout();
  TestTurnBackoff();
  uint64_t seed = 1;
  for (const std::vector<int>& sizes : {std::vector<int>{1, 1}, {2, 1}, {1, 2, 3}, {1, 1, 1, 1}}) {
    TestMessages(sizes, seed += 1000, rounds);
  }
  TestLate();
  Forget();
  std::printf("passed\n");
  return 0;
}
