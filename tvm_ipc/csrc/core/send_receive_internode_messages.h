/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file send_receive_internode_messages.h
 * \brief Messages between members of a team that are on several nodes, in one of its operations.
 *
 * A message begins with the descriptor of the operation, so that if the nodes disagree the error
 * names the call of each. Every receive has room for the longest possible message.
 */
#ifndef TVM_IPC_CORE_SEND_RECEIVE_INTERNODE_MESSAGES_H_
#define TVM_IPC_CORE_SEND_RECEIVE_INTERNODE_MESSAGES_H_

#include <cstddef>
#include <cstdint>

#include "core/collective_step_barrier.h"
#include "core/internode_request_queue.h"
#include "core/team_members_by_node.h"

namespace tvm_ipc {

/*! \brief Bytes of a message before its body. */
constexpr size_t kMessageHead = kLine;

/*! \brief The messages of a member in an operation; sender and receiver number them alike. */
class Messages {
 public:
  struct Incoming {
    RingTicket ticket;
    size_t buffer = 0;
    int from = 0;
  };

  /*!
   * \param here The members on this node.
   * \param buffers How many buffers of the ring to use.
   */
  Messages(InternodeRing& ring, const NodeLayout& layout, const TeamBarrier& here,
           const Descriptor& mine, size_t buffers);

  /*! \brief Return the address of a message's body, `at` bytes from the start of the buffer. */
  uint8_t* Body(size_t buffer, size_t at = 0) const {
    return use_.buffer(buffer) + at + kMessageHead;
  }
  /*! \brief Send the body to a rank of another node. */
  RingTicket Send(int to, RingPhase phase, int64_t number, size_t buffer, size_t at, size_t bytes);
  /*! \brief Post a receive from a rank of another node into a buffer. */
  Incoming Receive(int from, RingPhase phase, size_t buffer);
  /*! \brief Wait until a message has been sent. */
  void Await(const RingTicket& ticket) { use_.Await(ticket); }
  /*! \brief Wait for a message, check that it belongs to this operation, and return its body. */
  const uint8_t* Take(const Incoming& incoming, int64_t number, size_t bytes);
  void WakeEngine() { use_.WakeEngine(); }

 private:
  const Control& control() const { return ring_.rank().control(); }

  InternodeRing& ring_;
  const NodeLayout& layout_;
  const TeamBarrier& here_;
  const Descriptor mine_;
  RingLease use_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_SEND_RECEIVE_INTERNODE_MESSAGES_H_
