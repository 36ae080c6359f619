/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file control.h
 * \brief The layout of the memory that all ranks of a session share.
 *
 * One control block for the session, and one segment for each rank:
 *
 *   control   | abort, generation | rank states | teams | seats[place][rank] | channels[src][dst] |
 *   segment r | world 0 | world 1 | group 0 | group 1 | other teams | p2p to 0..n-1 | arena ......
 * |
 *
 * Where the ranks are on several nodes, each of these has a control block with an entry for every
 * rank, and segments of its own ranks alone, which have the wire (wire.h) before the arena.
 *
 * All of it is created at its full size, without pages, when the session starts; every rank maps
 * every segment once, and nothing is exchanged afterwards. A rank writes only its own seats, its
 * own side of channels and its own segment, but for abort, which anybody may set.
 */
#ifndef TVM_IPC_CORE_CONTROL_H_
#define TVM_IPC_CORE_CONTROL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/element.h"

namespace tvm_ipc {

constexpr int kMaxRanks = 64;
/*! \brief The most nodes on which a session has ranks. */
constexpr int kMaxNodes = kMaxRanks;
constexpr size_t kLine = 64;

/*! \brief The teams that every session has: all ranks, and the rank's own group. From `kFirstTeam`
 *         on those that programs make (teams.h). */
enum TeamId : int32_t { kWorld = 0, kGroup = 1, kFirstTeam = 2 };
/*! \brief The most teams that programs make. */
constexpr uint32_t kMaxTeams = 4096;
/*! \brief The most teams that a rank can be in: it has a seat for each. */
constexpr uint32_t kMaxSeats = 128;

/*! \brief Bytes of a staging buffer; each rank has two for each of its seats. */
constexpr size_t kStageBytes = 256 << 10;
/*! \brief Bytes of a point-to-point buffer; each ordered pair of ranks has two. */
constexpr size_t kPacketBytes = 64 << 10;

/*! \brief The name of an operation, as errors have it, in memory that processes share. */
struct OpName {
  char text[16] = "nothing";

  constexpr OpName() = default;
  template <size_t size>
  constexpr OpName(const char (&name)[size]) : text() {  // NOLINT: a name is written as one
    static_assert(size <= sizeof(text), "it has to fit with its end");
    for (size_t i = 0; i < size; ++i) text[i] = name[i];
  }
  bool operator==(const OpName& other) const { return memcmp(text, other.text, sizeof(text)) == 0; }
};

/*! \brief What a rank says of the operation it is in. Peers compare all but `offset`. */
struct Descriptor {
  OpName op;
  /*! \brief Whether it reduces, and how; else both are as they are here. */
  bool reduces = false;
  ReduceKind kind = ReduceKind::kSum;
  /*! \brief -1 where there is no choice. */
  int8_t strategy = -1;
  uint8_t flags = 0;
  ElementType type;
  uint64_t count = 0;
  /*! \brief A hash of more that must agree, such as how parts are divided; 0 where nothing has to.
   */
  uint64_t parts = 0;
  int32_t root = -1;
  /*! \brief Whether this rank's output overlaps its input. Peers choose by it, all alike. */
  uint32_t in_place = 0;
  /*! \brief Where this rank's input lies in its segment, or -1: in memory of its own. */
  int64_t offset = -1;

  bool Agrees(const Descriptor& o) const {
    return op == o.op && reduces == o.reduces && kind == o.kind && strategy == o.strategy &&
           flags == o.flags && type == o.type && count == o.count && parts == o.parts &&
           root == o.root;
  }
};

/*!
 * \brief A descriptor and the step it belongs to, in one cache line.
 *
 * Written by its owner alone: the descriptor first, then `seq` with release; a reader loads `seq`
 * with acquire and sees the descriptor and everything the owner wrote before it.
 */
struct alignas(kLine) Slot {
  std::atomic<uint32_t> seq;
  Descriptor descriptor;
};
static_assert(sizeof(Slot) == kLine, "one line, one transfer");

/*! \brief The most tensors that a rank can show to a team at a time: see core/shows.h. */
constexpr uint32_t kMaxShown = 64;

/*! \brief Memory that a rank shows to a team. */
struct ShownMemory {
  /*! \brief Where it lies in the rank's segment. */
  int64_t offset = 0;
  uint64_t count = 0;
  ElementType type;
  /*! \brief When it was shown: core/link.h. */
  int64_t time = 0;
};

/*! \brief What a rank shows to a team, written by it alone: number n at n % kMaxShown. */
struct Board {
  /*! \brief The last number; who sees it sees what was shown. */
  alignas(kLine) std::atomic<uint32_t> last;
  /*! \brief As in `Seat`, of those who sleep on `last`. */
  std::atomic<uint32_t> sleepers;
  alignas(kLine) ShownMemory memory[kMaxShown];
};

/*! \brief A rank's place in a team. Step e uses slot e & 1. */
struct Seat {
  Slot slot[2];
  /*! \brief How many peers sleep on one of the slots; its owner wakes them when not zero. */
  alignas(kLine) std::atomic<uint32_t> sleepers;
  /*! \brief Not zero while a rank that several threads act for is in an operation of the team. */
  std::atomic<uint32_t> busy;
  Board board;
};

/*! \brief A team that was made: its ranks in order, and which of its seats each has in it. */
struct TeamRecord {
  uint32_t copy;
  uint32_t size;
  uint8_t ranks[kMaxRanks];
  uint8_t places[kMaxRanks];
};
static_assert(kMaxSeats <= 256, "a place is a byte");

/*! \brief A one-way link between two ranks. Packet m uses slot m & 1, written by the sender. */
struct Channel {
  Slot slot[2];
  /*! \brief The last packet that the receiver has copied. */
  alignas(kLine) std::atomic<uint32_t> taken;
  std::atomic<uint32_t> sender_sleeps;
  alignas(kLine) std::atomic<uint32_t> receiver_sleeps;
  /*! \brief As `Seat::busy`, of each end. */
  std::atomic<uint32_t> sender_busy;
  std::atomic<uint32_t> receiver_busy;
};

/*! \brief Why waiting makes no sense any more; the rank or node it is about is in the upper bits.
 */
enum class AbortReason : uint32_t {
  kNone = 0,
  kFailed = 1,
  kDied = 2,
  kClosed = 3,
  kNodeLost = 4,
  kControllerLost = 5,
};

/*! \brief A node of a session that has several: its ranks, and what it is called in errors. */
struct NodeRecord {
  int32_t first;
  int32_t ranks;
  char name[56];
};

struct alignas(kLine) RankState {
  /*! \brief Set by a rank whose call failed; it skips what follows until the session recovers. */
  std::atomic<uint32_t> failed;
  std::atomic<int32_t> pid;
  /*! \brief How many exchanges the rank took part in since the last recovery. */
  std::atomic<uint32_t> exchanges;
  /*! \brief Seats in teams that were made. */
  std::atomic<uint32_t> seats;
  /*! \brief On several nodes: how many of the rank's questions about teams are answered. */
  std::atomic<uint32_t> answers;
  std::atomic<uint32_t> answers_sleepers;
  /*! \brief How many ranks map memory that it has exported. */
  std::atomic<int32_t> mapped;
};

struct Control {
  int32_t num_ranks;
  int32_t num_groups;
  int32_t controller_pid;
  /*! \brief The ranks whose workers and segments are on this node. */
  int32_t first_here;
  int32_t ranks_here;
  /*! \brief 0 where all of them are. */
  int32_t num_nodes;
  /*! \brief 0 where the ranks choose. */
  uint64_t arena_bytes;
  /*! \brief Of each segment, for what goes to other nodes (wire.h); 0 where there are none. */
  uint64_t wire_bytes;
  alignas(kLine) std::atomic<uint32_t> abort;
  /*! \brief Counts recoveries. A rank that sees a new value starts again at step 0. */
  std::atomic<uint32_t> generation;
  /*! \brief Rung when ranks have something for the engine that moves data between nodes. */
  alignas(kLine) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> engine_sleeps;
  /*! \brief The generation for which the engine is ready: nothing of older ones can arrive. */
  alignas(kLine) std::atomic<uint32_t> flushed;
  std::atomic<uint32_t> flushed_sleepers;
  RankState ranks[kMaxRanks];
  /*! \brief Held by whoever makes a team. */
  alignas(kLine) std::atomic<uint32_t> team_lock;
  std::atomic<uint32_t> num_teams;
  TeamRecord teams[kMaxTeams];
  NodeRecord nodes[kMaxNodes];
  /*! \brief [0]: everybody's seat in the world; [1]: its seat in its own group; then others. */
  Seat seats[kMaxSeats][kMaxRanks];

  /*! \brief How many of a rank's seats have been given to a team. */
  uint32_t num_seats(int rank) const {
    return kFirstTeam + ranks[rank].seats.load(std::memory_order_acquire);
  }

  /*! \brief Whether the rank's worker and segment are on this node. */
  bool IsHere(int rank) const {
    return static_cast<uint32_t>(rank) - static_cast<uint32_t>(first_here) <
           static_cast<uint32_t>(ranks_here);
  }
  /*! \brief The node of a rank; -1 if there is none, or no such rank. */
  int NodeOf(int rank) const {
    for (int i = 0; i < num_nodes; ++i) {
      if (rank >= nodes[i].first && rank < nodes[i].first + nodes[i].ranks) return i;
    }
    return -1;
  }

  Channel& channel(int src, int dst) { return channels()[src * num_ranks + dst]; }
  Channel* channels() { return reinterpret_cast<Channel*>(this + 1); }

  static size_t Bytes(int num_ranks) {
    return sizeof(Control) + sizeof(Channel) * num_ranks * num_ranks;
  }
};

constexpr uint32_t AbortWord(AbortReason reason, int rank) {
  return static_cast<uint32_t>(reason) | (static_cast<uint32_t>(rank) << 8);
}

/*! \brief Where the point-to-point buffers start in a segment. */
constexpr size_t kPacketStart = 2 * kMaxSeats * kStageBytes;

constexpr size_t WholeHugePages(size_t bytes) {
  constexpr size_t kHugePage = 2 << 20;
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
}

/*! \brief Where the wire starts in a segment. */
constexpr size_t WireStart(int num_ranks) {
  return WholeHugePages(kPacketStart + 2 * kPacketBytes * num_ranks);
}

/*! \brief Where the arena starts in a segment. */
inline size_t ArenaStart(const Control& control) {
  return WireStart(control.num_ranks) + control.wire_bytes;
}

/*! \brief Whether step a is step b or a later one. Steps wrap; peers are at most one apart. */
constexpr bool Reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_CONTROL_H_
