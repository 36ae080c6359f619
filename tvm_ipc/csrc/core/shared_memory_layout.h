/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file shared_memory_layout.h
 * \brief The layout of the memory that all ranks of a session share.
 *
 * One control block for the session, and one segment for each rank:
 *
 *   control:   abort, generation | ranks | teams | team_slots[slot][rank] | channels[src][dst]
 *   segment r: staging: world 0, 1; group 0, 1; other teams | p2p to 0..n-1 | arena ...
 *
 * In a session of several nodes each node has a control block with an entry for every rank, and
 * segments for its own ranks only. Their internode ring (internode_request_queue.h) precedes the
 * arena.
 *
 * Everything is created at its full size, without pages, when the session starts. Every rank maps
 * every segment once; nothing is exchanged afterwards. A rank writes only its own team slots, its
 * own side of channels and its own segment. The exception is `abort`, which any rank may set.
 */
#ifndef TVM_IPC_CORE_SHARED_MEMORY_LAYOUT_H_
#define TVM_IPC_CORE_SHARED_MEMORY_LAYOUT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/element_type_and_reduce_kind.h"

namespace tvm_ipc {

constexpr int kMaxRanks = 64;
/*! \brief The most nodes on which a session has ranks. */
constexpr int kMaxNodes = kMaxRanks;
constexpr size_t kLine = 64;

/*! \brief The teams that every session has: all ranks, and the rank's own group. User-created teams
 *         (teams.h) have the ids from `kFirstTeam` on. */
enum TeamId : int32_t { kNoTeam = -1, kWorld = 0, kGroup = 1, kFirstTeam = 2 };
/*! \brief The maximum number of user-created teams in a session. */
constexpr uint32_t kMaxTeams = 4096;
/*! \brief The maximum number of teams that a rank can belong to: it has a slot for each. */
constexpr uint32_t kMaxTeamSlots = 128;

/*! \brief Bytes of a staging buffer; each rank has two for each of its team slots. */
constexpr size_t kStageBytes = 256 << 10;
/*! \brief Bytes of a point-to-point buffer; each ordered pair of ranks has two. */
constexpr size_t kPacketBytes = 64 << 10;

/*! \brief The name of an operation, for errors, in memory that processes share. */
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

/*! \brief A rank's description of the operation it is in. Peers compare all fields but `in_place`
 *         and `offset`. */
struct Descriptor {
  OpName op;
  /*! \brief Whether it reduces, and how; otherwise both keep these defaults. */
  bool reduces = false;
  ReduceKind kind = ReduceKind::kSum;
  /*! \brief A Strategy; -1 if the operation has no choice. */
  int8_t strategy = -1;
  uint8_t flags = 0;
  ElementType type;
  uint64_t count = 0;
  /*! \brief A hash of further arguments that must agree, such as split sizes; 0 if there are none.
   */
  uint64_t layout_hash = 0;
  int32_t root = -1;
  /*! \brief Whether this rank's output overlaps its input. All peers read it to choose the same
   *         algorithm. */
  uint32_t in_place = 0;
  /*! \brief The offset of this rank's input in its segment; -1 if it is private memory. */
  int64_t offset = -1;

  bool Agrees(const Descriptor& o) const {
    return op == o.op && reduces == o.reduces && kind == o.kind && strategy == o.strategy &&
           flags == o.flags && type == o.type && count == o.count && layout_hash == o.layout_hash &&
           root == o.root;
  }
};

/*!
 * \brief A descriptor and the step it belongs to, in one cache line.
 *
 * Only its owner writes it: the descriptor first, then `seq` with release. A reader loads `seq`
 * with acquire and then sees the descriptor and everything the owner wrote before it.
 */
struct alignas(kLine) Slot {
  std::atomic<uint32_t> seq;
  Descriptor descriptor;
};
static_assert(sizeof(Slot) == kLine, "a slot is one cache line");

/*! \brief The maximum number of tensors that a rank can expose to a team at a time
 *         (core/exposed_buffers.h). */
constexpr uint32_t kMaxExposed = 64;

/*! \brief Memory that a rank exposes to a team. */
struct ExposedMemory {
  /*! \brief The offset in the rank's segment. */
  int64_t offset = 0;
  uint64_t count = 0;
  ElementType type;
  /*! \brief The time of exposure (core/emulated_link.h). */
  int64_t time = 0;
};

/*! \brief The buffers that a rank exposes to a team; only that rank writes it. Buffer number n is
 * at index n % kMaxExposed. */
struct ExposureTable {
  /*! \brief The last number; a reader that sees it (acquire) sees the entry. */
  alignas(kLine) std::atomic<uint32_t> last;
  /*! \brief The number of peers that sleep on `last`. */
  std::atomic<uint32_t> sleepers;
  alignas(kLine) ExposedMemory memory[kMaxExposed];
};

/*! \brief One rank's state in one team. Step e uses slot e & 1. */
struct TeamSlot {
  Slot slot[2];
  /*!
   * \brief The operation that its owner is in while it waits long for another node, and the step
   *        that it enters next. Peers that wait as well compare it with their own.
   */
  Slot stalled;
  /*! \brief The number of peers that sleep on one of the slots; the owner wakes them if not 0. */
  alignas(kLine) std::atomic<uint32_t> sleepers;
  /*! \brief Set while a rank with several threads is in an operation of the team. */
  std::atomic<uint32_t> in_use;
  ExposureTable exposure_table;
};

/*! \brief A user-created team: its ranks in order, and the team slot of each. */
struct TeamRecord {
  uint32_t copy;
  uint32_t size;
  uint8_t ranks[kMaxRanks];
  uint8_t slots[kMaxRanks];
};
static_assert(kMaxTeamSlots <= 256, "a slot index is a byte");

/*! \brief A one-way link between two ranks. Packet m uses slot m & 1, written by the sender. */
struct Channel {
  Slot slot[2];
  /*! \brief The last packet that the receiver has copied. */
  alignas(kLine) std::atomic<uint32_t> taken;
  std::atomic<uint32_t> sender_sleeps;
  alignas(kLine) std::atomic<uint32_t> receiver_sleeps;
  /*! \brief Like `TeamSlot::in_use`, for each end. */
  std::atomic<uint32_t> sender_in_use;
  std::atomic<uint32_t> receiver_in_use;
};

/*! \brief Why all waits of the session end. An abort word holds the rank or node concerned in its
 *         upper bits (AbortWord). */
enum class AbortReason : uint32_t {
  kNone = 0,
  kFailed = 1,
  kDied = 2,
  kClosed = 3,
  kNodeLost = 4,
  kControllerLost = 5,
};

/*! \brief A node of a session of several nodes: its ranks, and its name for errors. */
struct NodeRecord {
  int32_t first;
  int32_t ranks;
  char name[56];
};

struct alignas(kLine) RankState {
  /*! \brief Set by a rank whose call failed; it skips what follows until the session recovers. */
  std::atomic<uint32_t> failed;
  std::atomic<int32_t> pid;
  /*! \brief The number of handle all-gathers that the rank has entered since the last recovery. */
  std::atomic<uint32_t> handle_all_gathers;
  /*! \brief The number of user-created teams that the rank belongs to. */
  std::atomic<uint32_t> team_slots;
  /*! \brief With several nodes, the number of the rank's team requests that have been answered. */
  std::atomic<uint32_t> answers;
  std::atomic<uint32_t> answers_sleepers;
  /*! \brief The number of ranks that map memory exported by this one. */
  std::atomic<int32_t> mapped;
};

struct Control {
  int32_t num_ranks;
  int32_t num_groups;
  int32_t controller_pid;
  /*! \brief The first and the number of the ranks whose workers and segments are on this node. */
  int32_t first_here;
  int32_t ranks_here;
  /*! \brief 0 in a session of one machine. */
  int32_t num_nodes;
  /*! \brief 0 if the ranks choose. */
  uint64_t arena_bytes;
  /*! \brief Bytes of the internode ring in each segment (internode_request_queue.h); 0 with one
   * machine. */
  uint64_t ring_bytes;
  alignas(kLine) std::atomic<uint32_t> abort;
  /*! \brief Counts recoveries. A rank that sees a new value starts again at step 0. */
  std::atomic<uint32_t> generation;
  /*! \brief Incremented when ranks have posted messages for the engine that connects the nodes. */
  alignas(kLine) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> engine_sleeps;
  /*! \brief The generation that the engine is ready for: messages of older ones can no longer
   *         arrive. */
  alignas(kLine) std::atomic<uint32_t> flushed;
  std::atomic<uint32_t> flushed_sleepers;
  RankState ranks[kMaxRanks];
  /*! \brief A lock, held while a team is created. */
  alignas(kLine) std::atomic<uint32_t> team_lock;
  std::atomic<uint32_t> num_teams;
  TeamRecord teams[kMaxTeams];
  NodeRecord nodes[kMaxNodes];
  /*! \brief [0]: each rank's slot in the world; [1]: in its own group; then in user-created teams.
   */
  TeamSlot team_slots[kMaxTeamSlots][kMaxRanks];

  /*! \brief Return how many of a rank's slots belong to a team. */
  uint32_t num_team_slots(int rank) const {
    return kFirstTeam + ranks[rank].team_slots.load(std::memory_order_acquire);
  }

  /*! \brief Return whether the rank's worker and segment are on this node. */
  bool IsHere(int rank) const {
    return static_cast<uint32_t>(rank) - static_cast<uint32_t>(first_here) <
           static_cast<uint32_t>(ranks_here);
  }
  /*! \brief Return the node of a rank; -1 without nodes or without such a rank. */
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
constexpr AbortReason ReasonOf(uint32_t abort_word) {
  return static_cast<AbortReason>(abort_word & 0xff);
}
/*! \brief Return the rank or node that an abort word is about. */
constexpr int SubjectOf(uint32_t abort_word) { return static_cast<int>(abort_word >> 8); }

/*! \brief The offset of the point-to-point buffers in a segment. */
constexpr size_t kPacketStart = 2 * kMaxTeamSlots * kStageBytes;

constexpr size_t WholeHugePages(size_t bytes) {
  constexpr size_t kHugePage = 2 << 20;
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
}

/*! \brief Return the offset of the internode ring in a segment. */
constexpr size_t RingStart(int num_ranks) {
  return WholeHugePages(kPacketStart + 2 * kPacketBytes * num_ranks);
}

/*! \brief Return the offset of the arena in a segment. */
inline size_t ArenaStart(const Control& control) {
  return RingStart(control.num_ranks) + control.ring_bytes;
}

/*! \brief Return whether step a is step b or a later one. Steps wrap; peers are at most one apart.
 */
constexpr bool Reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_SHARED_MEMORY_LAYOUT_H_
