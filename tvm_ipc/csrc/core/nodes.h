/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file nodes.h
 * \brief What makes the hubs of several nodes one session: each node's hub has a link to the
 *        controller's, and what happens on one of them is known on all.
 *
 * A node tells of its ranks: who came, how far each is, errors, values, goodbyes, deaths. The
 * controller's monitor answers for all of them (monitor_of_nodes.cc). An abort goes from the hub
 * where it happened to the controller and from there to all nodes, ahead of everything else, with
 * the generation that it ends: what is of a generation that is over is ignored, what is of one that
 * has not begun here waits until it has. A recovery is a question of the controller to all nodes,
 * each of which answers when its ranks are idle and it has started again.
 *
 * The controller's hub alone gives teams their numbers, and tells each node of every team in their
 * order; so the tables are the same everywhere. A rank that needs a team which its node has not
 * asks for it, and has an answer when all that was there is here.
 *
 * A link that ends, or is silent, is the end of what is behind it.
 *
 * All of this runs in the hub's thread, but for `Attach`.
 */
#ifndef TVM_IPC_CORE_NODES_H_
#define TVM_IPC_CORE_NODES_H_

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/control.h"
#include "core/file.h"
#include "core/monitor.h"
#include "core/node_link.h"

namespace tvm_ipc {

class Nodes {
 public:
  /*! \param here The node whose hub this is; -1: the controller's. */
  Nodes(Control& control, Monitor& monitor, int here, const LinkTimes& times);

  /*! \brief A connection to a node, proven; of a node's hub, to the controller. Any thread. */
  void Attach(int node, File socket);

  /*! \brief Add what is to be polled; how many milliseconds, if nothing happens. */
  int Watch(std::vector<pollfd>* polled);
  void Serve(const pollfd& ready);
  /*! \brief After all who were served: say what is to be said, see who lives. */
  void Tidy();
  /*! \brief Whether what workers say has to wait, for it goes on slower than it comes. */
  bool full() const { return up_ != nullptr && up_->link.full(); }

 private:
  struct Other {
    Other(int node, File socket, const LinkTimes& times, bool late)
        : node(node), link(std::move(socket), times, late) {}
    int node;
    NodeLink link;
    /*! \brief Whether it knows of an abort of this generation. */
    bool told = false;
    uint32_t told_generation = 0;
    /*! \brief The last request to recover that it was told. */
    uint64_t asked = 0;
    /*! \brief How many teams it was told of. */
    uint32_t teams = 0;
  };

  void TakeNew();
  bool Handle(Other& other, NodeMessage message);
  bool HandleRecover(const NodeMessage& message);
  bool HandleTeam(Other& other, const NodeMessage& message);
  bool HandleQuestion(Other& other, const NodeMessage& message);
  void TellTeams(Other& other);
  void TellAborts();
  void AskToRecover();
  void AnswerRecovery();

  Control& control_;
  Monitor& monitor_;
  const int here_;
  const LinkTimes times_;
  std::vector<std::unique_ptr<Other>> others_;
  /*! \brief On a node: to the controller, and what is to be said until there is a link. */
  Other* up_ = nullptr;
  std::deque<NodeMessage> unsaid_;
  /*! \brief On a node: the generation that is to begin, since when; 0: none. */
  uint32_t beginning_ = 0;
  std::chrono::steady_clock::time_point since_;
  int patience_ = 0;
  std::mutex mutex_;
  std::vector<std::pair<int, File>> new_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_NODES_H_
