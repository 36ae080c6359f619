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

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/control.h"
#include "core/exchange.h"
#include "core/frame.h"

namespace tvm_ipc {

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
  void Watch(std::vector<pollfd>* polled);
  /*! \brief A worker says something, can be told something, or has ended. */
  void Serve(const pollfd& ready);

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

  Control& control_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Member> members_;
  Exchange exchange_;
  std::vector<RankReport> errors_;
  std::vector<std::string> refusals_;
  std::string instead_;
  std::map<uint64_t, std::string> values_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_MONITOR_H_
