/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_arena_block.h
 * \brief Memory that the engine uses for longer than one operation (internode_request_queue.h).
 *
 * A block is part of the rank's arena, which all ranks of the node map. It is never a tensor of
 * users: data to send is copied into it. It returns to the arena when all its messages are done,
 * and after an error only when the engine no longer uses anything of that generation.
 */
#ifndef TVM_IPC_CORE_INTERNODE_ARENA_BLOCK_H_
#define TVM_IPC_CORE_INTERNODE_ARENA_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "core/internode_request_queue.h"

namespace tvm_ipc {

class RingBlock {
 public:
  /*! \param operation The operation that needs it, for errors. */
  RingBlock(InternodeRing& ring, uint32_t generation, size_t bytes, const Descriptor& operation);
  ~RingBlock();
  RingBlock(const RingBlock&) = delete;
  RingBlock& operator=(const RingBlock&) = delete;

  uint8_t* data() const { return memory_.get(); }
  /*! \brief Return a shared pointer that keeps the memory. */
  const std::shared_ptr<uint8_t>& memory() const { return memory_; }
  /*! \brief Return the offset in the rank's segment. */
  int64_t offset() const { return offset_; }

  /*! \brief Post a send of bytes of the block to another node. */
  RingTicket Send(int node, int32_t tag, size_t at, size_t bytes);
  /*! \brief Post a receive from another node into the block. */
  RingTicket Receive(int node, int32_t tag, size_t at, size_t room);
  /*! \brief Wait, once, until it is done; return how many bytes it had. */
  size_t Await(const RingTicket& ticket, const TeamBarrier* where);
  /*! \brief Return whether it is done; it must be awaited nevertheless. */
  bool Done(const RingTicket& ticket) const;

 private:
  RingTicket Post(int node, int32_t tag, bool sends, size_t at, size_t bytes);

  InternodeRing& ring_;
  const uint32_t generation_;
  const Descriptor operation_;
  std::shared_ptr<uint8_t> memory_;
  int64_t offset_;
  size_t outstanding_ = 0;
};

/*!
 * \brief Wait until a request that a rank of this node has posted is done.
 * \param where The barrier of a team's operation, for errors; otherwise null.
 * \param stalled Called repeatedly during a long wait; may throw.
 */
void AwaitRequest(const Rank& rank, RingRequest& request, uint32_t target, const Descriptor& mine,
                  const TeamBarrier* where, const std::function<void()>& stalled = nullptr);
/*! \brief Return a request of a rank of this node. */
RingRequest& RequestOf(const Rank& rank, int owner, uint32_t request);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_INTERNODE_ARENA_BLOCK_H_
