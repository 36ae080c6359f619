/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_nodes_fuzz.cc
 * \brief Nonsense that a node hears from its controller, and in the wires of its ranks: it ends
 *        the link or the engine with an error at most, and nothing is read or written elsewhere.
 *
 * `test_nodes_fuzz <seconds> [<seed>]` spends half of the seconds on each. It does a few rounds in
 * any case, because a busy machine may give it no processor for that long.
 */
#include <chrono>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cluster.h"
#include "core/internode_request_queue_engine_side.h"
#include "core/session_server_node_message.h"
#include "core/teams.h"
#include "expect.h"

namespace tvm_ipc {
namespace {

using Type = NodeMessage::Type;
using Clock = std::chrono::steady_clock;
using Random = std::mt19937_64;

Clock::time_point In(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

NodeMessage RandomMessage(Random& random) {
  NodeMessage message;
  message.type = static_cast<Type>(1 + random() % 15);
  message.rank = static_cast<int32_t>(random() % 4 == 0 ? random() : random() % 5 - 1);
  if (random() % 8 == 0) message.rank = INT32_MIN;
  if (random() % 3 == 0) message.type = Type::kTeam;
  message.number = random() % 4;
  if (random() % 2 == 0) message.number |= (kFirstTeam + random() % 2) << 32;
  if (random() % 8 == 0) message.number = random();
  for (uint64_t i = random() % (random() % 16 == 0 ? 200 : 4); i-- > 0;) {
    message.text += static_cast<char>(random() % 4 == 0 ? random() : random() % 3);
  }
  return message;
}

/*! \brief Of a node's hub that hears this the table of teams is whole, and it ends when told. */
void TestController(double seconds, Random& random) {
  size_t rounds = 0, teams = 0;
  for (const auto end = In(seconds); rounds < 5 || Clock::now() < end; ++rounds) {
    SessionServer server(NodeOptions({1, 2}, 1, {}));
    auto [bad, there] = UnixPair();
    server.Attach(-1, std::move(there));
    std::string bytes;
    for (uint64_t i = 1 + random() % 20; i-- > 0;) {
      const uint64_t type = static_cast<uint64_t>(FrameType::kPiece) + random() % 3;
      bytes += Client::Framed(static_cast<FrameType>(type), RandomMessage(random).Pack());
    }
    for (uint64_t i = random() % 3; i-- > 0;) {
      const size_t at = random() % bytes.size();
      if (random() % 2 == 0) bytes[at] = static_cast<char>(random());
      if (random() % 4 == 0) bytes.resize(at + 1);
    }
    EXPECT(send(bad.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0);
    bad = File();
    const Control& control = server.segments()->control();
    const auto patience = In(30);
    while (control.abort.load() == 0) {
      EXPECT(Clock::now() < patience, "the end of the controller is not seen");
    }
    const uint32_t count = control.num_teams.load();
    EXPECT(count <= kMaxTeams, count, " teams");
    for (uint32_t team = 0; team < count; ++team, ++teams) {
      const TeamRecord& record = control.teams[team];
      EXPECT(record.size > 0 && record.size <= 3, "a team of ", record.size);
      for (uint32_t i = 0; i < record.size; ++i)
        EXPECT(record.ranks[i] < 3, "rank ", record.ranks[i]);
    }
  }
  std::printf("%zu controllers talked nonsense, and made %zu teams\n", rounds, teams);
}

/*! \brief Whatever is in the wire, the engine is given messages that lie in it, or an error. */
void TestTable(double seconds, Random& random) {
  SessionServer server(NodeOptions({1, 2}, 1, {}));
  const Segments& segments = *server.segments();
  std::vector<RingMessage> messages(64);
  size_t rounds = 0, taken = 0, refused = 0;
  for (const auto end = In(seconds); rounds < 100 || Clock::now() < end; ++rounds) {
    EngineRing ring(server.segments());
    ring.Flushed(0);
    for (int rank : {1, 2}) {
      auto& table = *reinterpret_cast<RingTable*>(segments.base(rank) + RingStart(3));
      const uint32_t posted = table.posted.load();
      const auto some = static_cast<uint32_t>(random() % 100);
      for (uint32_t i = 0; i < some; ++i) {
        // Mostly well formed, with one field that is not.
        const auto number = static_cast<uint16_t>(random() % kRingRequests);
        RingRequest& request = table.requests[number];
        request.sends = static_cast<int32_t>(random() % 2);
        request.peer = 0;
        request.tag = RingTag(kWorld, rank, 0, kFirstPhase);
        request.generation = 0;
        request.bytes = random() % (kRingBuffer + 1);
        request.offset = RingStart(3) + kRingTable + random() % RingBuffers(3) * kRingBuffer;
        switch (random() % 2000) {
          case 0:
            request.peer = static_cast<int32_t>(random());
            break;
          case 1:
            request.peer = 1;
            break;
          case 2:
            request.tag = static_cast<int32_t>(random());
            break;
          case 3:
            request.generation = static_cast<uint32_t>(random());
            break;
          case 4:
            request.bytes = random() >> (random() % 64);
            break;
          case 5:
            request.offset = random() >> (random() % 64);
            break;
        }
        table.queue[(posted + i) % kRingRequests] =
            static_cast<uint16_t>(random() % 500 == 0 ? random() : number);
      }
      table.posted.store(random() % 20 == 0 ? static_cast<uint32_t>(random()) : posted + some);
    }
    const auto patience = In(10);
    try {
      while (const size_t count = ring.Take(messages.data(), 1 + random() % messages.size())) {
        taken += count;
        for (size_t i = 0; i < count; ++i) {
          const RingMessage& ring_message = messages[i];
          EXPECT(ring_message.rank == 1 || ring_message.rank == 2);
          const uint64_t base = reinterpret_cast<uint64_t>(segments.base(ring_message.rank));
          EXPECT(ring_message.address >= base + RingStart(3) + kRingTable &&
                     ring_message.address + ring_message.bytes <= base + segments.segment_bytes() &&
                     ring_message.address + ring_message.bytes >= ring_message.address,
                 ring_message.bytes, " bytes at ", ring_message.address - base);
          EXPECT(ring_message.peer == 0 && ring_message.tag >= 0 &&
                 ring_message.tag <= kLargestTag && ring_message.generation == 0);
          ring.Done(ring_message.rank, ring_message.request, ring_message.bytes);
        }
        EXPECT(Clock::now() < patience, "the engine takes without end");
      }
    } catch (const Error& error) {
      ++refused;
      EXPECT(Contains(error.what(), "its memory has been overwritten"), error.what());
    }
    EXPECT(Clock::now() < patience, "the engine looked for long");
  }
  EXPECT(taken > 0 && refused > 0, taken, " messages were taken, ", refused, " tables refused");
  std::printf("%zu tables with nonsense, %zu refused, %zu messages\n", rounds, refused, taken);
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  using namespace tvm_ipc;
  const double seconds = argc > 1 ? std::stod(argv[1]) : 0.4;
  Random random(argc > 2 ? std::stoull(argv[2]) : 1);
  TestTable(seconds / 2, random);
  TestController(seconds / 2, random);
  std::printf("passed\n");
  return 0;
}
