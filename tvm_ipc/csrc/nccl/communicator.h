/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file communicator.h
 * \brief The NCCL communicator of a team, which never blocks and can be ended from another thread.
 */
#ifndef TVM_IPC_NCCL_COMMUNICATOR_H_
#define TVM_IPC_NCCL_COMMUNICATOR_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "core/shared_memory_layout.h"
#include "nccl/library.h"

namespace tvm_ipc::nccl {

/*! \brief The conditions that end a wait for NCCL. */
struct Limits {
  const Control& control;
  std::chrono::nanoseconds deadline;
};

/*! \brief An NCCL call and its result. */
struct Called {
  const char* name = "";
  Result result = kSuccess;
};
/*! \brief A function that calls NCCL until a call fails; it returns the last call. */
using Calls = std::function<Called(Handle)>;
/*! \brief A description for errors, built only when it is needed. */
using Words = std::function<std::string()>;

/*!
 * \brief A member's communicator.
 *
 * A blocking communicator waits for peers inside NCCL: for all of them when it is created, and for
 * peers it has not connected to yet in the first operations. It waits for a dead peer indefinitely.
 * So this communicator is nonblocking: NCCL returns "in progress", and this class polls until NCCL
 * has finished, the session has stopped, or the deadline has passed. The watch thread of the rank
 * may end the communicator meanwhile, so the lock is held during calls, but not between two polls.
 */
class Communicator {
 public:
  /*!
   * \brief Create the communicator. All members must do so, and wait for each other.
   * \param what Describes the communicator in errors.
   */
  Communicator(const Limits& limits, const Words& what, int size, int place, const UniqueId& id);
  ~Communicator() { End(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /*! \brief Enqueue the NCCL calls of `calls` as one group. `what` describes them in errors. */
  void Enqueue(const Words& what, const Calls& calls);

  /*! \brief Finalize together with the other members and destroy the communicator. Return false if
   *         that fails, or does not finish in time. */
  bool Leave(std::chrono::nanoseconds patience);
  /*! \brief Abort the communicator and its operations on the device. Any thread may call this. */
  void End();
  bool ended() const;
  /*! \brief Return NCCL's asynchronous error, or "" if there is none. */
  std::string AsynchronousError() const;

 private:
  void Await(const Words& what, const char* call);
  [[noreturn]] void FailEnded(const Words& what) const;

  const Library& library_;
  const Limits limits_;
  mutable std::mutex mutex_;
  /*! \brief The communicator; null once it has ended. */
  Handle handle_ = nullptr;
};

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_COMMUNICATOR_H_
