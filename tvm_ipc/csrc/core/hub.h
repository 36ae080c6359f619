/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file hub.h
 * \brief The controller's side of a session: creates the shared memory, lets the workers in,
 *        hears what they report, and notices when one is gone.
 *
 * A thread of its own listens, so that nothing the controller or a rank waits for can hide a
 * death. It marks the session as aborted, which ends every rank's wait.
 */
#ifndef TVM_IPC_CORE_HUB_H_
#define TVM_IPC_CORE_HUB_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/bootstrap.h"
#include "core/control.h"

namespace tvm_ipc {

struct HubOptions {
  int num_ranks = 1;
  double timeout_seconds = 300;
  /*! \brief Bytes of each rank's arena; 0 for DefaultArenaBytes. */
  size_t arena_bytes = 0;
  std::string instruction_set = "auto";
};

/*! \brief What one rank reported. */
struct RankReport {
  int rank;
  std::string kind;
  std::string message;
  std::string traceback;
};

/*! \brief What the controller needs to know when something is not as it should be. */
struct HubReport {
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
};

class Hub {
 public:
  explicit Hub(const HubOptions& options);
  ~Hub();
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;

  std::string invitation() const { return invitation_.Pack(); }

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

  /*! \brief What happened so far; of the errors, those since the last recovery. */
  HubReport Report();
  /*! \brief Keep the value that a rank will send for the key, until it is taken. */
  void WantValue(uint64_t key);
  /*! \brief The bytes of that value; empty if none came. Nobody wants it any more. */
  std::string TakeValue(uint64_t key);

  /*! \brief Clear the errors and their traces. All ranks live, and none is inside an operation. */
  void Recover();
  /*! \brief End all waits because the session closes. */
  void AbortClosed();
  /*! \brief Whether every rank said goodbye or died. */
  bool finished();

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
    std::string received;
  };

  /*!
   * \brief Somebody who connected and has not shown the token yet. Any program of the user can do
   *        that, any number of times: it costs a descriptor while there is room, and no wait.
   */
  struct Stranger {
    int socket;
    std::chrono::steady_clock::time_point came;
    std::string said;
  };

  void Listen();
  void Run();
  /*! \brief How long `poll` may sleep, in milliseconds, before somebody has to leave. */
  int Patience() const;
  bool Accept();
  void HearStranger(int socket);
  void Admit(int socket, const Hello& hello);
  void CloseDoor();
  void Hear(int rank);
  void HandleFrame(int rank, uint32_t type, std::string payload);
  void Leave(int rank, bool dead);
  bool KnowsToken(const Hello& hello) const;
  std::string CheckHello(const Hello& hello) const;

  HubOptions options_;
  Invitation invitation_;
  int listener_ = -1;
  int wake_ = -1;
  int control_file_ = -1;
  std::vector<int> segment_files_;
  size_t control_bytes_ = 0;
  Control* control_ = nullptr;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Member> members_;
  std::vector<Stranger> strangers_;  // in the order in which they came
  std::vector<RankReport> errors_;
  std::vector<std::string> refusals_;
  std::map<uint64_t, std::string> values_;
  bool stop_ = false;
  std::thread thread_;
};

/*! \brief Half of the machine's (or the container's) memory, divided by the ranks. */
size_t DefaultArenaBytes(int num_ranks);
/*! \brief Memory of the machine or, if it is less, of the container. */
size_t PhysicalMemory();

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_HUB_H_
