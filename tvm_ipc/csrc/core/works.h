/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file works.h
 * \brief Works: operations that a rank has posted, and that a thread of it does in their order,
 *        while the program does something else.
 *
 * All ranks of a session run one program, so they post the same works in the same order, and one
 * thread for each rank is enough for works of any teams: none waits for one that is behind it. A
 * work has a team of its own beside each team of the program (`Works::TeamFor`), so that the
 * program may go on with collectives of the same ranks.
 */
#ifndef TVM_IPC_CORE_WORKS_H_
#define TVM_IPC_CORE_WORKS_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/control.h"
#include "core/wait.h"

namespace tvm_ipc {

class Rank;

/*! \brief An operation that was posted. */
class Work {
 public:
  /*! \brief Returns when the work has ended; throws PeerError if it failed, or was not started. */
  void Wait();

 private:
  friend class Works;
  std::string name_;
  std::function<bool()> operation_;
  uint32_t generation_ = 0;
  bool failed_ = false;
  /*! \brief 1 when it has ended; what it wrote is seen by whoever sees that. */
  std::atomic<uint32_t> ended_{0};
  std::atomic<uint32_t> sleepers_{0};
};

/*! \brief The works of a rank, and the thread that does them. */
class Works {
 public:
  explicit Works(Rank& rank);
  /*! \brief Ends when all works have. */
  ~Works();
  Works(const Works&) = delete;
  Works& operator=(const Works&) = delete;

  /*!
   * \brief Let the thread do an operation when it has done all that was posted before.
   * \param name For errors.
   * \param operation Returns whether it went well. If not it has said so itself; it never throws.
   */
  std::shared_ptr<Work> Post(std::string name, std::function<bool()> operation);
  /*! \brief Returns when all that was posted has ended. */
  void Drain();

  /*! \brief Those that the calling thread does; nullptr for every other thread. */
  static Works* OfThisThread();
  /*! \brief The works' own team of the same ranks. For their thread alone. */
  TeamId TeamFor(TeamId team);

 private:
  void Run();
  void Do(Work& work);

  Rank& rank_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Work>> posted_;
  std::shared_ptr<Work> last_;
  /*! \brief How many were posted; the thread sleeps on it. */
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> stop_{0};
  std::map<TeamId, TeamId> teams_;
  std::thread thread_;
};

/*! \brief Copies of teams (teams.h) from here on are those of works. */
constexpr uint32_t kCopiesOfWorks = uint32_t{1} << 31;

/*!
 * \brief How works are waited for, and how they wait for each other: whoever yields its core to the
 *        program gets it back when the program's time is up, and who sleeps as soon as it is woken.
 */
constexpr WaitPolicy kWaitOfWorks{128, 0};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_WORKS_H_
