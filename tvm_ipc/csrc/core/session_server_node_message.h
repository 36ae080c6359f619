/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file session_server_node_message.h
 * \brief The messages between the session servers of the nodes and of the controller.
 *
 * Both ends have the same version, which is compared before they are linked. So numbers are sent in
 * their memory representation.
 */
#ifndef TVM_IPC_CORE_SESSION_SERVER_NODE_MESSAGE_H_
#define TVM_IPC_CORE_SESSION_SERVER_NODE_MESSAGE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/shared_memory_layout.h"

namespace tvm_ipc {

/*! \brief The most bytes of a message. */
constexpr size_t kLargestMessage = size_t{1} << 30;

struct NodeMessage {
  enum class Type : uint32_t {
    /*! \brief From a node: a worker was admitted; number: its process. */
    kGreeted = 1,
    /*! \brief From a node: a worker has joined; text: the fallback backend, or "". */
    kJoined = 2,
    /*! \brief From a node: a worker was not admitted; text: the reason. */
    kRefused = 3,
    /*! \brief From a node: a rank has passed the ticket in number. */
    kDone = 4,
    /*! \brief From a node: a rank's error; text: PackError. */
    kError = 5,
    /*! \brief From a node: a value; number: its key; text: its bytes. */
    kValue = 6,
    /*! \brief From a node: a rank has left. */
    kLeft = 7,
    /*! \brief From a node: a rank has died. */
    kDied = 8,
    /*! \brief From the controller: recover; number: the generation to begin. */
    kRecover = 9,
    /*! \brief From a node: it has begun the generation; text: why it has not, or "". */
    kRecovered = 10,
    /*! \brief From both: an abort; number: generation and abort word; rank: the process concerned.
     */
    kAbort = 11,
    /*! \brief From a node: a rank requests the team of these ranks, or all teams. From the
     *         controller: the next team. number: its id (0 in a request), then its copy; text: its
     *         ranks, a byte each. */
    kTeam = 12,
    /*! \brief From the controller: all teams that the rank requested have been sent. */
    kTeamsSent = 13,
    /*! \brief From both: a heartbeat. */
    kBeat = 14,
  };

  Type type = Type::kBeat;
  int32_t rank = -1;
  uint64_t number = 0;
  std::string text;

  std::string Pack() const;
  /*! \brief Parse a message; return false if the bytes are not a message. */
  static bool Unpack(const std::string& bytes, NodeMessage* message);
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_SESSION_SERVER_NODE_MESSAGE_H_
