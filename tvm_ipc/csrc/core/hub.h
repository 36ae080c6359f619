/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file hub.h
 * \brief The controller's side of a session: makes the shared memory, lets the workers in
 *        (rendezvous.h), and hears them from then on (monitor.h).
 *
 * A thread of its own listens, so that nothing the controller or a rank waits for can hide a
 * death. A death marks the session as aborted, which ends every rank's wait.
 */
#ifndef TVM_IPC_CORE_HUB_H_
#define TVM_IPC_CORE_HUB_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/backend.h"
#include "core/control.h"
#include "core/file.h"
#include "core/monitor.h"
#include "core/node_link.h"
#include "core/nodes.h"
#include "core/rendezvous.h"

namespace tvm_ipc {

class Segments;

/*! \brief A node of a session that has several. */
struct NodePlace {
  /*! \brief For errors; at most 55 letters. */
  std::string name;
  int ranks = 0;
};

struct HubOptions {
  const Backend* backend = nullptr;
  /*! \brief With which workers go on where the first one cannot connect them; nullptr: an error. */
  const Backend* otherwise = nullptr;
  int num_ranks = 1;
  double timeout_seconds = 300;
  /*! \brief Bytes of each rank's arena; 0 leaves them to the backend. */
  size_t arena_bytes = 0;
  std::string instruction_set = "auto";
  /*! \brief Reductions over several nodes go in the order of the ranks, and have the bits that they
   *         would have on one machine; else node by node, which sends less. */
  bool flat = false;
  /*! \brief The nodes, in the order of their ranks; none: all ranks are here. */
  std::vector<NodePlace> nodes;
  /*! \brief Which of them the hub is on; -1: it is the controller's, without ranks. */
  int node = -1;
  LinkTimes link_times;
};

class Hub {
 public:
  explicit Hub(const HubOptions& options);
  ~Hub();
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;

  std::string invitation() const { return rendezvous_->invitation().Pack(); }
  Monitor& monitor() { return *monitor_; }
  /*! \brief The id of the team of these ranks: see teams.h. */
  TeamId TeamOf(const std::vector<int>& ranks, uint32_t copy);
  /*!
   * \brief The session has several nodes: a connection to another hub, where both ends have proven
   *        who they are. The controller's has one to each node, a node's one to the controller.
   * \param node To which; of no meaning on a node.
   */
  void Attach(int node, File socket);
  /*! \brief Of a node's hub: the memory of its ranks, for the engine; else null. */
  const std::shared_ptr<Segments>& segments() const { return segments_; }
  /*! \brief End all waits because the session closes. */
  void AbortClosed();

 private:
  void Run();
  void Wake();

  struct Unmap {
    size_t bytes;
    void operator()(Control* control) const;
  };
  std::unique_ptr<Control, Unmap> control_;
  /*! \brief Ends the thread's sleep. */
  File wake_;
  std::unique_ptr<Monitor> monitor_;
  std::unique_ptr<Rendezvous> rendezvous_;
  /*! \brief Null where all ranks are here. */
  std::unique_ptr<Nodes> nodes_;
  std::shared_ptr<Segments> segments_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_HUB_H_
