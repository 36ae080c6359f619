/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file monitor.h
 * \brief What the controller knows of the workers that joined: who lives, how far each has come,
 *        what they report and fetch; and what they show each other through it.
 *
 * The hub's thread hears them. The controller's threads ask, and wait.
 */
#ifndef TVM_IPC_CORE_MONITOR_H_
#define TVM_IPC_CORE_MONITOR_H_

#include <poll.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/control.h"
#include "core/exchange.h"
#include "core/frame.h"
#include "core/node_message.h"

namespace tvm_ipc {

/*! \brief How long a thread that acts for a worker may take to come out of an ended operation. */
constexpr std::chrono::seconds kIdleTime{60};
constexpr const char* kNotIdle =
    "a thread that acts for one of its workers is still in an operation that was ended";

/*! \brief What one rank reported. */
struct RankReport {
  int rank;
  std::string kind;
  std::string message;
  std::string traceback;
};

/*! \brief What the controller needs to know when something is not as it should be. */
struct SessionReport {
  std::vector<int> joined;
  std::vector<int> dead;
  /*! \brief Those who said goodbye; before the session ends, because their program did. */
  std::vector<int> left;
  std::vector<int> pids;
  /*! \brief The last ticket each rank passed. */
  std::vector<uint64_t> done;
  std::vector<RankReport> errors;
  /*! \brief Why workers that know the token were not let in. */
  std::vector<std::string> refusals;
  /*! \brief With which backend the workers went on, and on the next line why; empty: the first one.
   */
  std::string changed;
  /*! \brief Of a session of several nodes: which are lost, and why. */
  std::vector<std::string> lost;
};

class Monitor {
 public:
  explicit Monitor(Control& control);
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  /*! \brief Whether all ranks joined within the time; false at once when one cannot any more. */
  bool WaitJoined(double seconds);
  /*! \brief A worker of this process could not come as far as the connection, which would say so.
   */
  void ReportError(RankReport error);

  enum class Progress { kDone = 0, kPending = 1, kAttention = 2 };
  /*! \brief Wait until every rank passed the ticket, or one is gone. */
  Progress WaitDone(uint64_t ticket, double seconds);
  /*! \brief Wait until every rank said goodbye or died. */
  bool WaitLeft(double seconds);
  /*! \brief Whether every rank said goodbye or died. */
  bool finished();

  /*! \brief What happened so far; of the errors, those since the last recovery. */
  SessionReport Report();
  /*! \brief Keep the value that a rank will send for the key, until it is taken. */
  void WantValue(uint64_t key);
  /*! \brief The bytes of that value; empty if none came. Nobody wants it any more. */
  std::string TakeValue(uint64_t key);
  /*!
   * \brief Clear the errors and their traces. All ranks live and have come to rest; threads that
   *        act for them may still be on their way out of an operation, and are waited for.
   */
  void Recover();

  // ---- For the hub's thread.

  /*! \brief A worker is let in; the socket is the monitor's from here on. */
  void Add(int rank, int pid, int socket);
  /*! \brief It is not, after all; the socket is the caller's again. */
  void Remove(int rank);
  /*! \brief A worker that knows the token is not. */
  void Refuse(const std::string& reason);
  /*! \brief Add what is to be polled. */
  void Watch(std::vector<pollfd>* polled, bool hear = true);
  /*! \brief A worker says something, can be told something, or has ended. */
  void Serve(const pollfd& ready);

  // ---- For the hubs of several nodes (nodes.h): monitor_of_nodes.cc.

  /*! \brief What ended the waits of a generation. */
  struct Ended {
    uint32_t generation = 0;
    uint32_t word = 0;
    /*! \brief Of the rank that it is about. */
    int pid = 0;
  };
  /*!
   * \brief This is a node's, which says on what it hears. `say` is called in the hub's thread, with
   *        the monitor locked.
   */
  void SayTo(std::function<void(NodeMessage)> say) { say_ = std::move(say); }
  /*! \brief How to end the sleep of the hub's thread. */
  void WakeBy(std::function<void()> wake) { wake_ = std::move(wake); }
  /*! \brief A node says something of its ranks; false if it may not. */
  bool HearNode(int node, NodeMessage message);
  /*! \brief The waits of a generation have ended on another node; false if it may not say so. */
  bool HearAbort(int node, uint32_t generation, uint32_t word, int pid);
  /*! \brief What ended the waits here, if they have. */
  Ended WhatEnded();
  void LoseNode(int node, const std::string& why);
  void LoseController(const std::string& why);
  /*! \brief The generation that all nodes are to begin, 0 if none; a number for each request. */
  uint32_t wanted_generation(uint64_t* request);
  /*! \brief On a node: begin the next generation, if nobody is in an operation any more. */
  bool BeginIfIdle();

 private:
  struct Member {
    int socket = -1;
    int process = -1;      // pidfd, or -1 where the system has none
    bool greeted = false;  // it said hello and got the files
    bool joined = false;   // it has mapped them
    bool left = false;
    bool dead = false;
    int pid = 0;
    uint64_t done = 0;
    FrameReader said;
    Outgoing outgoing;
  };

  void Hear(Member& member);
  void Handle(Member& member, Frame frame);
  void Leave(Member& member, bool dead);
  void Tell(Member& member);
  int RankOf(const Member& member) const { return static_cast<int>(&member - members_.data()); }
  /*! \brief A rank cannot go on, for a reason that it does not know itself. */
  void FailRank(int rank, const std::string& message);
  /*! \brief Whether this monitor answers for the rank. */
  bool Mine(int rank) const { return !say_ || control_.IsHere(rank); }
  bool Mine(const Member& member) const { return Mine(RankOf(member)); }
  void TakeValueIn(uint64_t key, std::string value);
  static bool UnpackReport(int rank, const std::string& payload, RankReport* report);
  /*! \brief The next generation: no errors, no abort. */
  void Begin();

  void Say(NodeMessage::About about, int rank, uint64_t number = 0, std::string text = "");
  bool HearOfNode(int node, NodeMessage message);
  void RecoverNodes(std::unique_lock<std::mutex>& lock);

  Control& control_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Member> members_;
  Exchange exchange_;
  std::vector<RankReport> errors_;
  std::vector<std::string> refusals_;
  std::string instead_;
  std::map<uint64_t, std::string> values_;

  std::function<void(NodeMessage)> say_;
  std::function<void()> wake_;
  std::vector<std::string> lost_;
  /*! \brief What ended a generation that has not begun here. */
  Ended coming_;
  /*! \brief A recovery that waits for the nodes: those that have begun, and why one cannot. */
  uint32_t wanted_generation_ = 0;
  uint64_t request_ = 0;
  std::vector<bool> recovered_;
  std::string not_recovered_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_MONITOR_H_
