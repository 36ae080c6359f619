/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file node_message.h
 * \brief What the hubs of a session's nodes and the controller's hub tell each other.
 *
 * Both ends are of one version, which is compared before there is a link; numbers are as they lie
 * in memory.
 */
#ifndef TVM_IPC_CORE_NODE_MESSAGE_H_
#define TVM_IPC_CORE_NODE_MESSAGE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/control.h"

namespace tvm_ipc {

/*! \brief The most bytes of a message. */
constexpr size_t kLargestMessage = size_t{1} << 30;

struct NodeMessage {
  enum class About : uint32_t {
    /*! \brief Of a node: a worker came; number: its process. */
    kGreeted = 1,
    /*! \brief Of a node: a worker has all it needs; text: with which backend it went on, or "". */
    kJoined = 2,
    /*! \brief Of a node: a worker was not let in; text: why. */
    kRefused = 3,
    /*! \brief Of a node: a rank passed a ticket, the number. */
    kDone = 4,
    /*! \brief Of a node: a rank's PackError. */
    kError = 5,
    /*! \brief Of a node: number: a key; text: the bytes of a value. */
    kValue = 6,
    /*! \brief Of a node: a rank said goodbye. */
    kLeft = 7,
    /*! \brief Of a node: a rank's end without that. */
    kDied = 8,
    /*! \brief Of the controller: the number of the generation that is to begin. */
    kRecover = 9,
    /*! \brief Of a node: it has begun; or text: why it has not. */
    kRecovered = 10,
    /*! \brief Of both: the generation and the abort word; rank: the process that it is about. */
    kAbort = 11,
    /*! \brief Of a node: a rank needs the team of these ranks, or all that there are. Of the
     *         controller: the next team. number: its id (0 in a question), then its copy; text: its
     *         ranks, a byte each. */
    kTeam = 12,
    /*! \brief Of the controller: it has said all that the rank asked for. */
    kTeamsSaid = 13,
    /*! \brief Of both: nothing but life. */
    kBeat = 14,
  };

  About about = About::kBeat;
  int32_t rank = -1;
  uint64_t number = 0;
  std::string text;

  std::string Pack() const;
  /*! \brief False if the bytes are none. */
  static bool Unpack(const std::string& bytes, NodeMessage* message);
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_NODE_MESSAGE_H_
