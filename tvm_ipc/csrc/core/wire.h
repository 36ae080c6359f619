/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file wire.h
 * \brief The wire: how a rank gives messages to the engine that moves them between nodes, and gets
 *        what came.
 *
 * A rank of a session on several nodes has a region of its segment for it: a table of requests, and
 * buffers. A request is one message to or from another node; it lies in one buffer. The rank fills
 * a request, puts its number into the queue and rings the bell of its node; the engine
 * (engine_wire.h), which runs elsewhere on the node, takes the requests of all ranks, and says when
 * each is done.
 *
 * Only buffers of the wire, and blocks that it has in the arena (wire_block.h), are the engine's,
 * never memory of users: after an error nobody has to wait for what is still on its way.
 *
 * Messages with one tag between two nodes arrive in the order in which they were posted, and are
 * received in the order in which receives were. A tag says which rank sends to which in which team,
 * and in which of four phases; so those who match posts and receives agree by their own order
 * alone.
 *
 * A recovery ends all of this: the engine forgets requests of older generations, sees to it that
 * nothing of them arrives any more, and then sets `Control::flushed`, for which ranks wait.
 */
#ifndef TVM_IPC_CORE_WIRE_H_
#define TVM_IPC_CORE_WIRE_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "core/control.h"

namespace tvm_ipc {

class Meeting;
class Rank;

/*! \brief The most requests of a rank at a time. */
constexpr uint32_t kWireRequests = 4096;
/*! \brief Bytes of a message behind its descriptor, at most. */
constexpr size_t kMessageBytes = 256 << 10;
/*! \brief Bytes of a buffer: a message, or parts of one with a descriptor and a whole line each. */
constexpr size_t kWireBuffer = kMessageBytes + (kMaxNodes + 1) * 2 * kLine;
static_assert(sizeof(Descriptor) <= kLine, "it is the first line of a message");

/*! \brief One message, posted and done any number of times. */
struct alignas(kLine) WireRequest {
  /*! \brief How often it was done; set by the engine. */
  std::atomic<uint32_t> done;
  std::atomic<uint32_t> sleepers;
  /*! \brief 1: it is sent; 0: it is to be received. */
  int32_t sends;
  /*! \brief The other node. */
  int32_t peer;
  int32_t tag;
  uint32_t generation;
  /*! \brief Where in the segment, and how much; of a receive how much there is room for. */
  uint64_t offset;
  uint64_t bytes;
  /*! \brief What came, set by the engine before `done`. */
  uint64_t came;
};

/*! \brief What the wire of a rank begins with. */
struct WireTable {
  /*! \brief How many requests have been posted: number n is the one in queue[n % kWireRequests]. */
  alignas(kLine) std::atomic<uint32_t> posted;
  alignas(kLine) uint16_t queue[kWireRequests];
  WireRequest requests[kWireRequests];
};

/*! \brief How many buffers a rank has: enough for four operations at a time. */
constexpr int WireBuffers(int num_ranks) { return 64 + 32 * num_ranks; }
constexpr size_t kWireTable = (sizeof(WireTable) + 4095) / 4096 * 4096;
/*! \brief Bytes of the wire; what is not used takes no memory. */
constexpr size_t WireBytes(int num_ranks) {
  return WholeHugePages(kWireTable + WireBuffers(num_ranks) * kWireBuffer);
}

/*! \brief What messages belong to; each phase has an order of its own. */
enum WirePhase : int32_t { kFirstPhase = 0, kSecondPhase = 1, kPacketPhase = 2, kShowPhase = 3 };

/*! \brief The tag of the messages of a team from one rank to another. */
constexpr int32_t WireTag(int32_t team, int from, int to, WirePhase phase) {
  return ((team * kMaxRanks + from) * kMaxRanks + to) * 4 + phase;
}
/*! \brief The largest that there is: what an engine has to be able to tell apart. */
constexpr int32_t kLargestTag =
    WireTag(kFirstTeam + kMaxTeams - 1, kMaxRanks - 1, kMaxRanks - 1, kShowPhase);

/*!
 * \brief Whether messages of a tag are worth more one after the other than all at once: readers
 *        wait for each, as it comes. There may be many of them, which share the network otherwise,
 *        and would all be there at the end.
 */
constexpr bool GoInTurn(int32_t tag) { return tag % 4 == kShowPhase; }

/*! \brief Wake the engine of the node, if it sleeps. */
void Ring(Control& control);

/*! \brief A request that a rank has posted. */
struct WireTicket {
  uint32_t request = 0;
  /*! \brief What `done` reaches. */
  uint32_t target = 0;
};

/*! \brief The wire of one rank: which requests and buffers are free. Several threads may use it. */
class RankWire {
 public:
  explicit RankWire(Rank& rank);

  Rank& rank() const { return rank_; }
  /*! \brief Throw unless so many requests can be posted beside those that wait to be done. */
  void RequireRequests(uint32_t generation, size_t count, const Descriptor& mine);

 private:
  friend class WireBlock;
  friend class WireUse;

  /*! \brief The engine is ready for this generation; all is free in a new one. */
  void Follow(uint32_t generation, const Descriptor& mine);
  std::vector<int> TakeBuffers(size_t least, size_t most, const Descriptor& mine);
  void GiveBuffers(uint32_t generation, const std::vector<int>& buffers);
  WireTicket Post(const WireRequest& request, const Descriptor& mine);
  void Release(uint32_t generation, const WireTicket& ticket);
  void Leave(uint32_t generation, const WireTicket& ticket, int buffer, int peer);
  /*! \brief The oldest message that was left for a peer, if these are more than so many. */
  bool OldestLeft(int peer, size_t most, WireTicket* ticket);
  /*! \brief Take back what was left to the engine and is done. */
  void Reclaim();
  /*! \brief Keep memory of a block until the engine has let go of it: see wire_block.h. */
  void Hold(uint32_t generation, std::shared_ptr<const void> memory);
  /*! \brief Wait for another thread to give something back. */
  void AwaitFree(std::unique_lock<std::mutex>& lock, const char* what, const Descriptor& mine);

  uint8_t* base() const { return base_; }
  WireTable& table() const { return *reinterpret_cast<WireTable*>(base_); }

  Rank& rank_;
  uint8_t* base_;
  std::mutex mutex_;
  std::condition_variable freed_;
  bool followed_ = false;
  uint32_t generation_ = 0;
  struct Left {
    WireTicket ticket;
    int buffer;
    int peer;
  };
  std::deque<Left> left_;
  std::vector<std::shared_ptr<const void>> held_;
  std::vector<int> free_buffers_;
  std::vector<uint32_t> free_requests_;
  /*! \brief How often each request was posted. */
  std::vector<uint32_t> uses_;
};

/*!
 * \brief What an operation uses of the wire.
 *
 * At its end it gives back what it used, but for what is still the engine's after an error: that is
 * free again when the session has recovered.
 */
class WireUse {
 public:
  /*!
   * \param generation Of the operation.
   * \param where Of a team's operation, its meeting, for errors; else null.
   * \param least Buffers without which it cannot go on; it waits for other threads to give them
   *        back.
   * \param most What it would use.
   */
  WireUse(RankWire& wire, uint32_t generation, const Meeting* where, const Descriptor& mine,
          size_t least, size_t most);
  ~WireUse();
  WireUse(const WireUse&) = delete;
  WireUse& operator=(const WireUse&) = delete;

  size_t buffers() const { return buffers_.size(); }
  uint8_t* buffer(size_t number) const { return wire_.base() + Start(number); }
  /*! \brief Where a buffer is in the rank's segment, where ranks of the node read it. */
  int64_t offset(size_t number) const;

  /*! \brief Post bytes of a buffer, from a whole line on, for another node. */
  WireTicket Send(int node, int32_t tag, size_t buffer, size_t at, size_t bytes);
  /*! \brief Post a buffer for what another node sends. */
  WireTicket Receive(int node, int32_t tag, size_t buffer);
  /*! \brief The engine is to look; `Await` says it too. */
  void Ring();
  /*! \brief Whether it is done; it has to be awaited all the same. */
  bool Done(const WireTicket& ticket) const;
  /*! \brief Wait until it is done; how many bytes it had. */
  size_t Await(const WireTicket& ticket);
  /*! \brief Leave a message, and its buffer, to the engine: nobody waits for it. */
  void Leave(const WireTicket& ticket, size_t buffer, int peer);
  /*! \brief Wait until at most so many are left for a peer. */
  void AwaitLeft(int peer, size_t most);

 private:
  size_t Start(size_t number) const;
  void WaitDone(const WireTicket& ticket);
  WireTicket Post(int node, int32_t tag, bool sends, uint64_t offset, size_t bytes);

  RankWire& wire_;
  const uint32_t generation_;
  const Meeting* where_;
  const Descriptor mine_;
  std::vector<int> buffers_;
  /*! \brief Of these, what was left. */
  std::vector<int> left_;
  size_t outstanding_ = 0;
  bool rung_ = true;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_WIRE_H_
