/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file wire_block.h
 * \brief Memory that is on the wire (wire.h) for longer than one operation.
 *
 * A block lies in the rank's arena, where all ranks of the node map it, and is never a tensor of
 * users: what is sent out of it was copied there. It goes back to the arena when all its messages
 * are done; after an error only when the engine has let go of everything of that generation.
 */
#ifndef TVM_IPC_CORE_WIRE_BLOCK_H_
#define TVM_IPC_CORE_WIRE_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/wire.h"

namespace tvm_ipc {

class WireBlock {
 public:
  /*! \param operation For errors: what needs it. */
  WireBlock(RankWire& wire, uint32_t generation, size_t bytes, const Descriptor& operation);
  ~WireBlock();
  WireBlock(const WireBlock&) = delete;
  WireBlock& operator=(const WireBlock&) = delete;

  uint8_t* data() const { return memory_.get(); }
  /*! \brief Keeps the memory. */
  const std::shared_ptr<uint8_t>& memory() const { return memory_; }
  /*! \brief Where it begins in the rank's segment. */
  int64_t offset() const { return offset_; }

  /*! \brief Post bytes of it for another node. */
  WireTicket Send(int node, int32_t tag, size_t at, size_t bytes);
  /*! \brief Give a part of it for what another node sends. */
  WireTicket Receive(int node, int32_t tag, size_t at, size_t room);
  /*! \brief Wait until it is done, once; how many bytes it had. */
  size_t Await(const WireTicket& ticket, const Meeting* where);
  /*! \brief Whether it is done; it has to be awaited all the same. */
  bool Done(const WireTicket& ticket) const;

 private:
  WireTicket Post(int node, int32_t tag, bool sends, size_t at, size_t bytes);

  RankWire& wire_;
  const uint32_t generation_;
  const Descriptor operation_;
  std::shared_ptr<uint8_t> memory_;
  int64_t offset_;
  size_t outstanding_ = 0;
};

/*!
 * \brief Wait until a request is done, which a rank of this node has posted.
 * \param where The meeting of a team's operation, for errors; else null.
 */
void AwaitRequest(const Rank& rank, WireRequest& request, uint32_t target, const Descriptor& mine,
                  const Meeting* where);
/*! \brief A request of a rank of this node. */
WireRequest& RequestOf(const Rank& rank, int owner, uint32_t request);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_WIRE_BLOCK_H_
