/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file session_server.h
 * \brief The controller's side of a session: creates the shared memory, admits the workers
 *        (admit_workers_to_session.h), and then receives their messages
 * (worker_status_and_error_table.h).
 *
 * It has its own thread, so that a death is noticed whatever the controller or a rank waits for. A
 * death marks the session as aborted, which ends every rank's wait.
 */
#ifndef TVM_IPC_CORE_SESSION_SERVER_H_
#define TVM_IPC_CORE_SESSION_SERVER_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/admit_workers_to_session.h"
#include "core/communication_backend.h"
#include "core/file_descriptor_and_memory_file.h"
#include "core/internode_control_messages_and_heartbeats.h"
#include "core/internode_session_event_relay.h"
#include "core/shared_memory_layout.h"
#include "core/worker_status_and_error_table.h"

namespace tvm_ipc {

class Segments;

/*! \brief A node of a session of several nodes. */
struct NodeSpec {
  /*! \brief The name in errors; at most 55 characters. */
  std::string name;
  int ranks = 0;
};

struct SessionServerOptions {
  const Backend* backend = nullptr;
  /*! \brief The fallback if the first backend cannot connect the workers; nullptr for an error. */
  const Backend* otherwise = nullptr;
  int num_ranks = 1;
  double timeout_seconds = 300;
  /*! \brief Bytes of each rank's arena; 0 lets the backend choose. */
  size_t arena_bytes = 0;
  std::string instruction_set = "auto";
  /*! \brief Whether reductions over several nodes add in rank order, with the same bits as on one
   *         machine; otherwise they add node by node, which sends less. */
  bool flat = false;
  /*! \brief The nodes, in the order of their ranks; empty if all ranks are on this machine. */
  std::vector<NodeSpec> nodes;
  /*! \brief The node of this server; -1 for the controller, which has no ranks. */
  int node = -1;
  LinkTimes link_times;
};

class SessionServer {
 public:
  explicit SessionServer(const SessionServerOptions& options);
  ~SessionServer();
  SessionServer(const SessionServer&) = delete;
  SessionServer& operator=(const SessionServer&) = delete;

  std::string invitation() const { return admission_->invitation().Pack(); }
  WorkerTable& worker_table() { return *worker_table_; }
  /*! \brief Return the id of the team of these ranks (teams.h). */
  TeamId TeamOf(const std::vector<int>& ranks, uint32_t copy);
  /*!
   * \brief Add an authenticated connection to another session server, in a session of several
   * nodes. The controller has one to each node, a node one to the controller.
   * \param node The node it leads to; ignored on a node.
   */
  void Attach(int node, File socket);
  /*! \brief On a node: the memory of its ranks, for the engine; otherwise null. */
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
  /*! \brief An eventfd that ends the thread's sleep. */
  File wake_;
  std::unique_ptr<WorkerTable> worker_table_;
  std::unique_ptr<Admission> admission_;
  /*! \brief Null in a session of one machine. */
  std::unique_ptr<Nodes> nodes_;
  std::shared_ptr<Segments> segments_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_SESSION_SERVER_H_
