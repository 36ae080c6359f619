/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file communicator.h
 * \brief NCCL's communicator of a team, which never blocks and can be ended from another thread.
 */
#ifndef TVM_IPC_NCCL_COMMUNICATOR_H_
#define TVM_IPC_NCCL_COMMUNICATOR_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "core/control.h"
#include "nccl/library.h"

namespace tvm_ipc::nccl {

/*! \brief What ends a wait for NCCL. */
struct Limits {
  const Control& control;
  std::chrono::nanoseconds deadline;
};

/*! \brief A call of NCCL, and what came of it. */
struct Called {
  const char* name = "";
  Result result = kSuccess;
};
/*! \brief Calls of NCCL, up to the first that fails. */
using Calls = std::function<Called(Handle)>;
/*! \brief Something to be said if it is asked for. */
using Words = std::function<std::string()>;

/*!
 * \brief A member's part of a communicator.
 *
 * NCCL would wait for peers in its calls: for all of them when a communicator is made, for those
 * that have not been met yet in the first operations. A peer that has died is waited for for ever.
 * So communicators are of the kind that does not block; NCCL says "in progress" instead, and this
 * looks from time to time whether it has come further, the session has stopped, or the deadline has
 * passed. The thread that watches the rank may end the communicator meanwhile: the lock is held in
 * calls, never while anybody waits.
 */
class Communicator {
 public:
  /*!
   * \brief Meet the other members, all of which do this.
   * \param what For errors: whose it is.
   */
  Communicator(const Limits& limits, const Words& what, int size, int place, const UniqueId& id);
  ~Communicator() { End(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /*! \brief Enqueue what `calls` calls, as one group. `what` is for errors. */
  void Enqueue(const Words& what, const Calls& calls);

  /*! \brief Meet the other members once more, and end. False where they do not come. */
  bool Leave(std::chrono::nanoseconds patience);
  /*! \brief Stop what it does on the device, and end it. Any thread may. */
  void End();
  bool ended() const;
  /*! \brief What NCCL has found out since; empty if all is well. */
  std::string AsynchronousError() const;

 private:
  void Await(const Words& what, const char* call);
  [[noreturn]] void FailEnded(const Words& what) const;

  const Library& library_;
  const Limits limits_;
  mutable std::mutex mutex_;
  /*! \brief Null once it has ended. */
  Handle handle_ = nullptr;
};

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_COMMUNICATOR_H_
