/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file wire_messages.h
 * \brief Messages between members of a team that are on several nodes, in one of its operations.
 *
 * A message begins with the descriptor of the operation, so that nodes which disagree get an error
 * that says what each of them called. Every receive has room for the longest message there is.
 */
#ifndef TVM_IPC_CORE_WIRE_MESSAGES_H_
#define TVM_IPC_CORE_WIRE_MESSAGES_H_

#include <cstddef>
#include <cstdint>

#include "core/layout.h"
#include "core/meeting.h"
#include "core/wire.h"

namespace tvm_ipc {

/*! \brief Bytes of a message before what it says. */
constexpr size_t kMessageHead = kLine;

/*! \brief The messages of a member in an operation, numbered by whoever sends and receives them. */
class Messages {
 public:
  struct Coming {
    WireTicket ticket;
    size_t buffer = 0;
    int from = 0;
  };

  /*!
   * \param here The members on this node.
   * \param buffers Of the wire, as many as it takes.
   */
  Messages(RankWire& wire, const Layout& layout, const Meeting& here, const Descriptor& mine,
           size_t buffers);

  /*! \brief Where a message's bytes are to be, `at` bytes from the buffer's begin. */
  uint8_t* Body(size_t buffer, size_t at = 0) const {
    return use_.buffer(buffer) + at + kMessageHead;
  }
  /*! \brief Send what is in the body to a rank of another node. */
  WireTicket Send(int to, WirePhase phase, int64_t number, size_t buffer, size_t at, size_t bytes);
  /*! \brief Give a buffer for what a rank of another node sends. */
  Coming Receive(int from, WirePhase phase, size_t buffer);
  /*! \brief Wait until a message was sent. */
  void Await(const WireTicket& ticket) { use_.Await(ticket); }
  /*! \brief Wait for what comes, which has to be of this operation; its body. */
  const uint8_t* Take(const Coming& coming, int64_t number, size_t bytes);
  void Ring() { use_.Ring(); }

 private:
  const Control& control() const { return wire_.rank().control(); }

  RankWire& wire_;
  const Layout& layout_;
  const Meeting& here_;
  const Descriptor mine_;
  WireUse use_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_WIRE_MESSAGES_H_
