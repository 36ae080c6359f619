/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file worker_handshake.h
 * \brief The handshake by which a worker joins a session: an invitation, then files over a Unix
 *        socket.
 *
 * The session server listens on an abstract Unix socket with a random name. Disco carries the
 * invitation (socket name, random token, machine) to every worker. A worker connects and sends a
 * hello with the token. The server checks the token and that the peer is the same user, and answers
 * with the memory files. A worker that has mapped them has joined. The socket then carries frames
 * until the worker sends a goodbye; an end without a goodbye is the worker's death.
 */
#ifndef TVM_IPC_CORE_WORKER_HANDSHAKE_H_
#define TVM_IPC_CORE_WORKER_HANDSHAKE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tvm_ipc {

class Backend;
class Rank;

struct Hello {
  char token[16];
  /*! \brief The backend's name, padded with zeros. */
  char backend[16];
  int32_t rank;
  int32_t num_ranks;
  int32_t num_groups;
  int32_t pid;
};

/*! \brief The session server's answer to an admitted worker, sent together with the files. */
struct Welcome {
  int64_t deadline_ns;
  uint32_t spins;
  uint32_t yields;
  char instruction_set[16];
  /*! \brief The fallback backend if the first one cannot connect the workers, or "". */
  char otherwise[16];
  /*! \brief `RankOptions::flat`. */
  uint32_t flat;
};

struct Invitation {
  std::string socket_name;
  std::string token;
  /*! \brief Boot id and host name of the controller's machine. */
  std::string machine;

  /*! \brief Make an invitation with a random socket name and token. */
  static Invitation Make();
  std::string Pack() const;
  static Invitation Unpack(const std::string& bytes);
};

/*! \brief The invitation to a node's session server, and the node's number of ranks. */
struct NodeInvitation {
  int ranks;
  std::string invitation;
};

/*! \brief Pack the invitations of all nodes, which every rank of a session of several nodes gets.
 */
std::string PackInvitations(const std::vector<NodeInvitation>& nodes);
/*! \brief Return the invitation for a rank, from a list of nodes or a single invitation. */
Invitation InvitationOf(const std::string& bytes, int rank);

/*! \brief The kind of process of a rank that accepts an invitation. */
enum class Home {
  kOwn,         // a process that serves only the session
  kController,  // the controller's process, which survives the session server
};

/*!
 * \brief Accept the invitation: connect, map the memory, become a rank of the session, and start
 * the backend.
 *
 * \param device The index of the rank's device, of the type that the backend works on.
 * \param find Looks up the fallback backend by name.
 * \param prepare Called before the backend starts; its Error is reported to the controller.
 *
 * In a process other than the session server's, a thread then watches the connection. When the
 * server is gone it ends the process, or in the controller's process the waits of the rank.
 */
std::unique_ptr<Rank> Join(const Invitation& invitation, const Backend& backend, int rank,
                           int num_ranks, int num_groups, int device = 0,
                           const Backend& (*find)(const std::string& name) = nullptr,
                           Home home = Home::kOwn, const std::function<void(Rank&)>& prepare = {});

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_WORKER_HANDSHAKE_H_
