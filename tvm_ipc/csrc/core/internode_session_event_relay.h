/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_session_event_relay.h
 * \brief Connects the session servers of several nodes to one session: each node's server has a
 * link to the controller's, and events on one node reach all nodes.
 *
 * A node forwards the events of its ranks: joins, progress, errors, values, departures, deaths. The
 * controller's worker table covers all ranks (worker_status_and_error_table.h). An abort goes from
 * its node to the controller and from there to all nodes, ahead of all other messages, with the
 * generation that it ends. An abort of a past generation is ignored; an abort of a generation that
 * has not begun on the receiving node waits until it has. For a recovery the controller sends a
 * request to all nodes, and each answers when its ranks are idle and it has begun the next
 * generation.
 *
 * Only the controller's server numbers teams. It sends every team to each node in the order of the
 * numbers, so the tables are the same everywhere. A rank that needs a team that its node does not
 * have requests it; the answer follows all teams that existed at that time.
 *
 * When a link ends or stays silent, the node or controller behind it counts as lost.
 *
 * Everything but `Attach` runs in the session server's thread.
 */
#ifndef TVM_IPC_CORE_INTERNODE_SESSION_EVENT_RELAY_H_
#define TVM_IPC_CORE_INTERNODE_SESSION_EVENT_RELAY_H_

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/file_descriptor_and_memory_file.h"
#include "core/internode_control_messages_and_heartbeats.h"
#include "core/shared_memory_layout.h"
#include "core/worker_status_and_error_table.h"

namespace tvm_ipc {

class Nodes {
 public:
  /*! \param here The node of this server; -1 for the controller. */
  Nodes(Control& control, WorkerTable& worker_table, int here, const LinkTimes& times);

  /*! \brief Add an authenticated connection: to a node, or on a node to the controller. Any thread
   *         may call this. */
  void Attach(int node, File socket);

  /*! \brief Add the descriptors to poll; return the poll timeout in milliseconds. */
  int Watch(std::vector<pollfd>* polled);
  void Serve(const pollfd& ready);
  /*! \brief Send pending messages and check the links; called after all descriptors were served. */
  void Tidy();
  /*! \brief Return whether workers' messages must wait because the controller takes them too
   *         slowly. */
  bool full() const { return controller_ != nullptr && controller_->link.full(); }

 private:
  struct Peer {
    Peer(int node, File socket, const LinkTimes& times, bool late)
        : node(node), link(std::move(socket), times, late) {}
    int node;
    NodeLink link;
    /*! \brief Whether it knows of an abort, and of which generation. */
    bool knows_abort = false;
    uint32_t abort_generation = 0;
    /*! \brief The last recovery request that was sent to it. */
    uint64_t recovery_request = 0;
    /*! \brief The number of teams that were sent to it. */
    uint32_t teams = 0;
  };

  void AdoptAttached();
  bool Handle(Peer& peer, NodeMessage message);
  bool HandleRecover(const NodeMessage& message);
  bool HandleTeam(Peer& peer, const NodeMessage& message);
  bool HandleQuestion(Peer& peer, const NodeMessage& message);
  void SendTeams(Peer& peer);
  void SendAborts();
  void RequestRecovery();
  void AnswerRecovery();

  Control& control_;
  WorkerTable& worker_table_;
  const int here_;
  const LinkTimes times_;
  std::vector<std::unique_ptr<Peer>> peers_;
  /*! \brief On a node: the controller, and the messages that wait until it is connected. */
  Peer* controller_ = nullptr;
  std::deque<NodeMessage> unsent_;
  /*! \brief On a node: the generation to begin, and when it was requested; 0 for none. */
  uint32_t next_generation_ = 0;
  std::chrono::steady_clock::time_point since_;
  int patience_ = 0;
  std::mutex mutex_;
  std::vector<std::pair<int, File>> attached_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_INTERNODE_SESSION_EVENT_RELAY_H_
