/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_request_queue.h
 * \brief The internode ring: a rank's queue of messages for the engine, which moves them between
 *        nodes.
 *
 * In a session of several nodes each rank has a region of its segment for the ring: a table of
 * requests, and buffers. A request is one message to or from another node, in one buffer. The rank
 * fills a request, puts its number into the queue and increments the node's `Control::bell`. The
 * engine (internode_request_queue_engine_side.h), in another process of the node, takes the
 * requests of all ranks and marks each as done.
 *
 * The engine accesses only buffers of the ring and blocks in the arena
 * (internode_arena_block.h), never memory of users. So after an error no rank has to wait for
 * messages in flight.
 *
 * Messages with the same tag between two nodes arrive in the order in which they were posted, and
 * match receives in the order in which those were posted. A tag names the sender, the receiver, the
 * team and one of four phases. So sends and receives match if both ranks post in the same order.
 *
 * On a recovery the engine drops requests of older generations, ensures that their messages can no
 * longer arrive, and then sets `Control::flushed`, which ranks wait for.
 */
#ifndef TVM_IPC_CORE_INTERNODE_REQUEST_QUEUE_H_
#define TVM_IPC_CORE_INTERNODE_REQUEST_QUEUE_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "core/shared_memory_layout.h"

namespace tvm_ipc {

class TeamBarrier;
class Rank;

/*! \brief The maximum number of requests of a rank at a time. */
constexpr uint32_t kRingRequests = 4096;
/*! \brief The maximum number of bytes of a message after its descriptor. */
constexpr size_t kMessageBytes = 256 << 10;
/*! \brief Bytes of a buffer: a message, or pieces of one, each with a descriptor and whole cache
 * lines. */
constexpr size_t kRingBuffer = kMessageBytes + (kMaxNodes + 1) * 2 * kLine;
static_assert(sizeof(Descriptor) <= kLine, "a descriptor fits the first line of a message");

/*! \brief A message slot, which is posted and completed any number of times. */
struct alignas(kLine) RingRequest {
  /*! \brief The number of completions; set by the engine. */
  std::atomic<uint32_t> done;
  std::atomic<uint32_t> sleepers;
  /*! \brief 1: send; 0: receive. */
  int32_t sends;
  /*! \brief The other node. */
  int32_t peer;
  int32_t tag;
  uint32_t generation;
  /*! \brief Offset in the segment, and length; for a receive the capacity. */
  uint64_t offset;
  uint64_t bytes;
  /*! \brief The number of received bytes; set by the engine before `done`. */
  uint64_t received;
};

/*! \brief The table at the start of a rank's ring. */
struct RingTable {
  /*! \brief The number of posted requests; number n is the one in queue[n % kRingRequests]. */
  alignas(kLine) std::atomic<uint32_t> posted;
  alignas(kLine) uint16_t queue[kRingRequests];
  RingRequest requests[kRingRequests];
};

/*! \brief Return the number of buffers of a rank: enough for four operations at a time. */
constexpr int RingBuffers(int num_ranks) { return 64 + 32 * num_ranks; }
constexpr size_t kRingTable = (sizeof(RingTable) + 4095) / 4096 * 4096;
/*! \brief Return the bytes of the ring; unused pages take no memory. */
constexpr size_t RingBytes(int num_ranks) {
  return WholeHugePages(kRingTable + RingBuffers(num_ranks) * kRingBuffer);
}

/*! \brief The phase of a message; each phase has its own order. */
enum RingPhase : int32_t { kFirstPhase = 0, kSecondPhase = 1, kPacketPhase = 2, kExposePhase = 3 };

/*! \brief Return the tag of the messages of a team from one rank to another. */
constexpr int32_t RingTag(int32_t team, int from, int to, RingPhase phase) {
  return ((team * kMaxRanks + from) * kMaxRanks + to) * 4 + phase;
}
/*! \brief The largest tag, which an engine must support. */
constexpr int32_t kLargestTag =
    RingTag(kFirstTeam + kMaxTeams - 1, kMaxRanks - 1, kMaxRanks - 1, kExposePhase);

/*!
 * \brief Return whether messages of a tag should arrive one after the other, because readers wait
 *        for each of them in turn. If all were sent at once, they would share the network and all
 *        arrive at the end.
 */
constexpr bool IsSequential(int32_t tag) { return tag % 4 == kExposePhase; }

/*! \brief Wake the engine of the node if it sleeps. */
void WakeEngine(Control& control);

/*! \brief A request that a rank has posted. */
struct RingTicket {
  uint32_t request = 0;
  /*! \brief The value of `done` when it is completed. */
  uint32_t target = 0;
};

/*! \brief The ring of one rank, with its free requests and buffers. Thread-safe. */
class InternodeRing {
 public:
  explicit InternodeRing(Rank& rank);

  Rank& rank() const { return rank_; }
  /*! \brief Throw unless `count` more requests can be outstanding. */
  void RequireRequests(uint32_t generation, size_t count, const Descriptor& mine);

 private:
  friend class RingBlock;
  friend class RingLease;

  /*! \brief Wait until the engine is ready for this generation; a new generation frees everything.
   */
  void Follow(uint32_t generation, const Descriptor& mine);
  std::vector<int> TakeBuffers(size_t least, size_t most, const Descriptor& mine);
  void GiveBuffers(uint32_t generation, const std::vector<int>& buffers);
  RingTicket Post(const RingRequest& request, const Descriptor& mine);
  void Release(uint32_t generation, const RingTicket& ticket);
  void Detach(uint32_t generation, const RingTicket& ticket, int buffer, int peer);
  /*! \brief Get the oldest detached message for a peer, if there are more than `most`. */
  bool OldestDetached(int peer, size_t most, RingTicket* ticket);
  /*! \brief Reclaim detached messages that are done. */
  void Reclaim();
  /*! \brief Keep the memory of a block until the engine no longer uses it
   * (internode_arena_block.h). */
  void Hold(uint32_t generation, std::shared_ptr<const void> memory);
  /*! \brief Wait for another thread to release buffers or requests. */
  void AwaitFree(std::unique_lock<std::mutex>& lock, const char* what, const Descriptor& mine);

  uint8_t* base() const { return base_; }
  RingTable& table() const { return *reinterpret_cast<RingTable*>(base_); }

  Rank& rank_;
  uint8_t* base_;
  std::mutex mutex_;
  std::condition_variable freed_;
  bool followed_ = false;
  uint32_t generation_ = 0;
  struct Detached {
    RingTicket ticket;
    int buffer;
    int peer;
  };
  std::deque<Detached> detached_;
  std::vector<std::shared_ptr<const void>> held_;
  std::vector<int> free_buffers_;
  std::vector<uint32_t> free_requests_;
  /*! \brief The number of times each request was posted. */
  std::vector<uint32_t> uses_;
};

/*!
 * \brief The buffers and requests of the ring that one operation uses.
 *
 * The destructor returns them, except for those that the engine may still use after an error. These
 * are free again when the session has recovered.
 */
class RingLease {
 public:
  /*!
   * \param generation The generation of the operation.
   * \param where The barrier of a team's operation, to compare the members' calls during long
   * waits; otherwise null.
   * \param least The number of buffers that it needs; it waits for other threads to release them.
   * \param most The number of buffers that it can use.
   */
  RingLease(InternodeRing& ring, uint32_t generation, const TeamBarrier* where,
            const Descriptor& mine, size_t least, size_t most);
  ~RingLease();
  RingLease(const RingLease&) = delete;
  RingLease& operator=(const RingLease&) = delete;

  size_t buffers() const { return buffers_.size(); }
  uint8_t* buffer(size_t number) const { return ring_.base() + Start(number); }
  /*! \brief Return a buffer's offset in the rank's segment, where ranks of the node read it. */
  int64_t offset(size_t number) const;

  /*! \brief Post a send of bytes of a buffer, which begin at a whole cache line. */
  RingTicket Send(int node, int32_t tag, size_t buffer, size_t at, size_t bytes);
  /*! \brief Post a receive into a buffer. */
  RingTicket Receive(int node, int32_t tag, size_t buffer);
  /*! \brief Make the engine look at the posted requests; `Await` does so too. */
  void WakeEngine();
  /*! \brief Return whether it is done; it must be awaited nevertheless. */
  bool Done(const RingTicket& ticket) const;
  /*! \brief Wait until it is done; return how many bytes it had. */
  size_t Await(const RingTicket& ticket);
  /*! \brief Detach a message and its buffer: nothing waits for it. */
  void Detach(const RingTicket& ticket, size_t buffer, int peer);
  /*! \brief Wait until at most `most` detached messages to a peer remain. */
  void AwaitDetached(int peer, size_t most);

 private:
  size_t Start(size_t number) const;
  void WaitDone(const RingTicket& ticket);
  RingTicket Post(int node, int32_t tag, bool sends, uint64_t offset, size_t bytes);

  InternodeRing& ring_;
  const uint32_t generation_;
  const TeamBarrier* where_;
  const Descriptor mine_;
  std::vector<int> buffers_;
  /*! \brief The detached ones among them. */
  std::vector<int> detached_;
  size_t outstanding_ = 0;
  bool engine_woken_ = true;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_INTERNODE_REQUEST_QUEUE_H_
