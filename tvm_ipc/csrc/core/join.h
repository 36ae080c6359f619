/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file join.h
 * \brief How a worker joins a session: an invitation, a Unix socket, files that come with it.
 *
 * The controller's hub listens on an abstract Unix socket with a random name. Disco carries the
 * invitation (socket name, random token, machine) to every worker. A worker connects and says
 * hello with the token; the hub checks the token and that the peer is the same user, and answers
 * with the memory files. A worker that has mapped them has joined. The socket then carries frames
 * until the worker says goodbye; its end without a goodbye is the worker's death.
 */
#ifndef TVM_IPC_CORE_JOIN_H_
#define TVM_IPC_CORE_JOIN_H_

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
  /*! \brief Its name; zeros follow. */
  char backend[16];
  int32_t rank;
  int32_t num_ranks;
  int32_t num_groups;
  int32_t pid;
};

/*! \brief What the hub answers to a worker that it lets in, together with the files. */
struct Welcome {
  int64_t deadline_ns;
  uint32_t spins;
  uint32_t yields;
  char instruction_set[16];
  /*! \brief The backend with which workers go on where the first one cannot connect them, or "". */
  char otherwise[16];
  /*! \brief `RankOptions::flat`. */
  uint32_t flat;
};

struct Invitation {
  std::string socket_name;
  std::string token;
  /*! \brief Boot id and host name of the controller's machine. */
  std::string machine;

  /*! \brief An invitation that nobody else knows. */
  static Invitation Make();
  std::string Pack() const;
  static Invitation Unpack(const std::string& bytes);
};

/*! \brief The invitation of a node's hub, for so many ranks. */
struct NodeInvitation {
  int ranks;
  std::string invitation;
};

/*! \brief What all ranks of a session of several nodes are given: the invitation of each node. */
std::string PackInvitations(const std::vector<NodeInvitation>& nodes);
/*! \brief The invitation of a rank's node; what is no such list is the one of all ranks. */
Invitation InvitationOf(const std::string& bytes, int rank);

/*! \brief Where a rank lives that accepts an invitation. */
enum class Home {
  kOwn,         // a process that has nothing to do without the session
  kController,  // the controller's process, which survives the hub that the rank has joined
};

/*!
 * \brief Accept the invitation: connect, map the memory, become a rank of the session, and start
 * the backend.
 *
 * \param device The rank's, of the kind that the backend works on.
 * \param find A backend by its name, for sessions that go on with another one.
 * \param prepare Called before the backend starts; the controller hears of its Error.
 *
 * In a process other than the hub's a thread watches the connection from now on, and ends the
 * process when the hub is gone; in the controller's it ends the waits of the rank instead.
 */
std::unique_ptr<Rank> Join(const Invitation& invitation, const Backend& backend, int rank,
                           int num_ranks, int num_groups, int device = 0,
                           const Backend& (*find)(const std::string& name) = nullptr,
                           Home home = Home::kOwn, const std::function<void()>& prepare = {});

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_JOIN_H_
