/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file works.h
 * \brief Works: operations that a rank has posted, and that are done in their order, while the
 *        program does something else.
 *
 * All ranks of a session run one program, so they post the same works in the same order, and one
 * thread for each rank, or one stream of its device, is enough for works of any teams: none waits
 * for one that is behind it. A work has a team of its own beside each team of the program
 * (`Works::TeamFor`), so that the program may go on with collectives of the same ranks.
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
  virtual ~Work() = default;
  /*!
   * \brief What the calling thread does from now on is done when the work has ended. Throws
   *        PeerError if it failed, or was not started.
   */
  virtual void Wait() = 0;

 protected:
  [[noreturn]] static void FailWork(const std::string& name);
};

/*! \brief The works of a rank. */
class Works {
 public:
  explicit Works(Rank& rank) : rank_(rank) {}
  /*! \brief Ends when all works have. */
  virtual ~Works() = default;
  Works(const Works&) = delete;
  Works& operator=(const Works&) = delete;

  /*!
   * \brief Let an operation be done when all that was posted before has been.
   * \param name For errors.
   * \param operation Returns whether it went well. If not it has said so itself; it never throws.
   *        What it holds is kept until it has been done.
   */
  virtual std::shared_ptr<Work> Post(std::string name, std::function<bool()> operation) = 0;
  /*! \brief Returns when all that was posted has ended. */
  virtual void Drain() = 0;

  /*! \brief Those of which the calling thread does one now, or nullptr. */
  static Works* OfThisThread();
  /*! \brief The works' own team of the same ranks. For who does one of them. */
  TeamId TeamFor(TeamId team);

 protected:
  /*! \brief While it lives, the calling thread does a work; one thread at a time. */
  class Doing {
   public:
    explicit Doing(Works& works);
    ~Doing();
    Doing(const Doing&) = delete;
    Doing& operator=(const Doing&) = delete;
  };

  Rank& rank_;

 private:
  std::map<TeamId, TeamId> teams_;
};

/*! \brief Works that a thread of the rank does. */
class WorksOfThread final : public Works {
 public:
  explicit WorksOfThread(Rank& rank);
  ~WorksOfThread() final;

  std::shared_ptr<Work> Post(std::string name, std::function<bool()> operation) final;
  void Drain() final;

 private:
  class One;

  void Run();
  void Do(One& work);

  std::mutex mutex_;
  std::deque<std::shared_ptr<One>> posted_;
  std::shared_ptr<One> last_;
  /*! \brief How many were posted; the thread sleeps on it. */
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> stop_{0};
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
