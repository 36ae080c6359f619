/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file worker_status_and_error_table.h
 * \brief The workers that have joined a session: which are alive, their progress, the errors they
 *        report, the values they send, and the handles they exchange.
 *
 * The session server's thread receives their messages. The controller's threads query and wait.
 */
#ifndef TVM_IPC_CORE_WORKER_STATUS_AND_ERROR_TABLE_H_
#define TVM_IPC_CORE_WORKER_STATUS_AND_ERROR_TABLE_H_

#include <poll.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/frame.h"
#include "core/handle_allgather_via_session_server.h"
#include "core/session_server_node_message.h"
#include "core/shared_memory_layout.h"

namespace tvm_ipc {

/*! \brief The time that a thread that acts for a worker has to leave an aborted operation. */
constexpr std::chrono::seconds kIdleTime{60};
constexpr const char* kNotIdle =
    "a thread that acts for one of its workers is still in an operation that was aborted";

/*! \brief An error that a rank has reported. */
struct RankReport {
  int rank;
  std::string kind;
  std::string message;
  std::string traceback;
};

/*! \brief The state of all workers, for the controller's errors. */
struct SessionReport {
  std::vector<int> joined;
  std::vector<int> dead;
  /*! \brief The ranks that have left the session; before its end, because their program ended. */
  std::vector<int> left;
  std::vector<int> pids;
  /*! \brief The last ticket that each rank has passed. */
  std::vector<uint64_t> done;
  std::vector<RankReport> errors;
  /*! \brief Why workers that know the token were not admitted. */
  std::vector<std::string> refusals;
  /*! \brief The fallback backend that the workers continue with, and on the next line the reason;
   *         empty for the first one. */
  std::string changed;
  /*! \brief With several nodes: which are lost, and why. */
  std::vector<std::string> lost;
};

class WorkerTable {
 public:
  explicit WorkerTable(Control& control);
  ~WorkerTable();
  WorkerTable(const WorkerTable&) = delete;
  WorkerTable& operator=(const WorkerTable&) = delete;

  /*! \brief Wait until all ranks have joined; return false after the time, or at once when one
   *         cannot join any more. */
  bool WaitJoined(double seconds);
  /*! \brief Report that a worker of this process failed before it had a connection. */
  void ReportError(RankReport error);

  enum class Progress { kDone = 0, kPending = 1, kAttention = 2 };
  /*! \brief Wait until every rank has passed the ticket, or one has left or died. */
  Progress WaitDone(uint64_t ticket, double seconds);
  /*! \brief Wait until every rank has left or died. */
  bool WaitLeft(double seconds);
  /*! \brief Return whether every rank has left or died. */
  bool finished();

  /*! \brief Return the state of all workers. Errors are those since the last recovery. */
  SessionReport Report();
  /*! \brief Keep the value that a rank will send for the key until it is taken. */
  void ExpectValue(uint64_t key);
  /*! \brief Return the bytes of that value and forget the key; empty if none arrived. */
  std::string TakeValue(uint64_t key);
  /*!
   * \brief Clear the errors and begin the next generation. All ranks must be alive and idle; waits
   *        for threads that act for them and are still leaving an operation.
   */
  void Recover();

  // ---- For the session server's thread.

  /*! \brief Add an admitted worker; takes ownership of the socket. */
  void Add(int rank, int pid, int socket);
  /*! \brief Undo `Add`; the caller owns the socket again. */
  void Remove(int rank);
  /*! \brief Record that a worker which knows the token was not admitted. */
  void Refuse(const std::string& reason);
  /*! \brief Add the descriptors to poll; without `receive` only for sending. */
  void Watch(std::vector<pollfd>* polled, bool receive = true);
  /*! \brief Handle a ready descriptor: a worker's messages, its end, or room to send. */
  void Serve(const pollfd& ready);

  // ---- For the session servers of several nodes (internode_session_event_relay.h).

  /*! \brief The cause of the abort of a generation. */
  struct AbortRecord {
    uint32_t generation = 0;
    uint32_t word = 0;
    /*! \brief The process of the rank concerned. */
    int pid = 0;
  };
  /*!
   * \brief Make this a node's table, which forwards everything to the controller. `notify` is
   * called in the session server's thread, with the table locked.
   */
  void ForwardTo(std::function<void(NodeMessage)> notify) { notify_ = std::move(notify); }
  /*! \brief Set the function that wakes the session server's thread. */
  void SetWake(std::function<void()> wake) { wake_ = std::move(wake); }
  /*! \brief Handle a node's message about its ranks; false if the node may not send it. */
  bool HandleNodeMessage(int node, NodeMessage message);
  /*! \brief Handle the abort of a generation on another node; false if it may not send it. */
  bool HandleNodeAbort(int node, uint32_t generation, uint32_t word, int pid);
  /*! \brief Return the cause of the current generation's abort; word 0 if it is not aborted. */
  AbortRecord CurrentAbort();
  void LoseNode(int node, const std::string& why);
  void LoseController(const std::string& why);
  /*! \brief Return the generation that all nodes must begin, 0 if none; `request` numbers the
   *         requests. */
  uint32_t wanted_generation(uint64_t* request);
  /*! \brief On a node: begin the next generation if no thread is in an operation. */
  bool BeginIfIdle();

 private:
  struct Member {
    int socket = -1;
    int process = -1;      // pidfd; -1 if the system has none
    bool greeted = false;  // it has sent its hello and got the files
    bool joined = false;   // it has mapped the files
    bool left = false;
    bool dead = false;
    int pid = 0;
    uint64_t done = 0;
    FrameReader incoming;
    Outgoing outgoing;
  };

  void Receive(Member& member);
  void Handle(Member& member, Frame frame);
  void Leave(Member& member, bool dead);
  void Flush(Member& member);
  int RankOf(const Member& member) const { return static_cast<int>(&member - members_.data()); }
  /*! \brief Abort because of an error of a rank that the rank itself cannot report. */
  void FailRank(int rank, const std::string& message);
  /*! \brief Return whether this table is responsible for the rank. */
  bool IsLocal(int rank) const { return !notify_ || control_.IsHere(rank); }
  bool IsLocal(const Member& member) const { return IsLocal(RankOf(member)); }
  void StoreValue(uint64_t key, std::string value);
  static bool UnpackReport(int rank, const std::string& payload, RankReport* report);
  /*! \brief Begin the next generation, without errors and abort. */
  void BeginGeneration();

  void Notify(NodeMessage::Type type, int rank, uint64_t number = 0, std::string text = "");
  bool ApplyNodeMessage(int node, NodeMessage message);
  void RecoverNodes(std::unique_lock<std::mutex>& lock);

  Control& control_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Member> members_;
  HandleAllGather handle_all_gather_;
  std::vector<RankReport> errors_;
  std::vector<std::string> refusals_;
  std::string fallback_;
  std::map<uint64_t, std::string> values_;

  std::function<void(NodeMessage)> notify_;
  std::function<void()> wake_;
  std::vector<std::string> lost_;
  /*! \brief The abort of a generation that has not begun on this node. */
  AbortRecord pending_abort_;
  /*! \brief A recovery that waits for the nodes: which have begun, and why one cannot. */
  uint32_t wanted_generation_ = 0;
  uint64_t recovery_request_ = 0;
  std::vector<bool> recovered_;
  std::string not_recovered_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_WORKER_STATUS_AND_ERROR_TABLE_H_
