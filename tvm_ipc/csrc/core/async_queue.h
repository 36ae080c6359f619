/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file async_queue.h
 * \brief Asynchronous operations: a rank starts them, and they run in order while the program does
 *        something else.
 *
 * All ranks of a session run one program, so they start the same operations in the same order. One
 * thread per rank, or one stream of its device, is enough for operations of all teams: none waits
 * for a later one. For each team of the program asynchronous operations use a separate team
 * (`AsyncQueue::TeamFor`), so that the program may call collectives of the same ranks meanwhile.
 */
#ifndef TVM_IPC_CORE_ASYNC_QUEUE_H_
#define TVM_IPC_CORE_ASYNC_QUEUE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/shared_memory_layout.h"
#include "core/wait.h"

namespace tvm_ipc {

class Rank;

/*! \brief An asynchronous operation that was started. */
class Request {
 public:
  virtual ~Request() = default;
  /*!
   * \brief Order what the calling thread does next after the operation. Throw PeerError if the
   *        operation failed or was not started.
   */
  virtual void Wait() = 0;

 protected:
  [[noreturn]] static void FailRequest(const std::string& name);
};

/*! \brief The asynchronous operations of a rank. */
class AsyncQueue {
 public:
  explicit AsyncQueue(Rank& rank) : rank_(rank) {}
  /*! \brief The destructor waits for all operations. */
  virtual ~AsyncQueue() = default;
  AsyncQueue(const AsyncQueue&) = delete;
  AsyncQueue& operator=(const AsyncQueue&) = delete;

  /*!
   * \brief Start an operation, which runs after all that were started before.
   * \param name For errors.
   * \param operation Returns whether it succeeded. It reports its own errors and never throws. Its
   *        captures are kept until it has run.
   */
  virtual std::shared_ptr<Request> Start(std::string name, std::function<bool()> operation) = 0;
  /*! \brief Return when all operations have ended. */
  virtual void Drain() = 0;

  /*! \brief Return the queue whose operation the calling thread runs now; nullptr for none. */
  static AsyncQueue* OfThisThread();
  /*! \brief Return the team of the same ranks that asynchronous operations use. Only the thread
   * that runs one may call this. */
  TeamId TeamFor(TeamId team);

 protected:
  /*! \brief While it lives, the calling thread runs operations; one thread at a time. */
  class RunningScope {
   public:
    explicit RunningScope(AsyncQueue& async_queue);
    ~RunningScope();
    RunningScope(const RunningScope&) = delete;
    RunningScope& operator=(const RunningScope&) = delete;
  };

  Rank& rank_;

 private:
  std::map<TeamId, TeamId> teams_;
};

/*! \brief Asynchronous operations that run on a thread of the rank. */
class ThreadAsyncQueue final : public AsyncQueue {
 public:
  explicit ThreadAsyncQueue(Rank& rank);
  ~ThreadAsyncQueue() final;

  std::shared_ptr<Request> Start(std::string name, std::function<bool()> operation) final;
  void Drain() final;

 private:
  class QueuedRequest;

  void Run();
  void Do(QueuedRequest& request);

  std::mutex mutex_;
  std::deque<std::shared_ptr<QueuedRequest>> queued_;
  std::shared_ptr<QueuedRequest> last_;
  /*! \brief The number of started operations; the thread sleeps on it. */
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> stop_{0};
  std::thread thread_;
};

/*! \brief Copies of teams (teams.h) from this number on belong to asynchronous operations. */
constexpr uint32_t kAsyncTeamCopies = uint32_t{1} << 31;

/*!
 * \brief The wait policy of asynchronous operations: no yields. A thread that yields its core to
 * the program gets it back only when the program's time slice ends; a thread that sleeps gets it as
 * soon as it is woken.
 */
constexpr WaitPolicy kAsyncWaitPolicy{128, 0};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_ASYNC_QUEUE_H_
