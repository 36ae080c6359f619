/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_progress_engine.h
 * \brief The engine of a node, which exchanges messages with other nodes for its ranks.
 *
 * Ranks post messages in shared memory (core/internode_request_queue.h). A thread of the node's
 * agent passes them to a transport and marks them as done. The transport reads and writes the
 * ranks' memory without a copy.
 *
 * When the session has recovered from an error, older messages may still be in flight. All engines
 * flush them, and then ranks may post again (`Control::flushed`).
 */
#ifndef TVM_IPC_ENGINE_INTERNODE_PROGRESS_ENGINE_H_
#define TVM_IPC_ENGINE_INTERNODE_PROGRESS_ENGINE_H_

#include <atomic>
#include <chrono>
#include <functional>

#include "core/internode_request_queue_engine_side.h"
#include "engine/transport.h"

namespace tvm_ipc::engine {

/*! \brief Yields the processor while no message makes progress, for increasing times. */
class IdleBackoff {
 public:
  using Nanoseconds = std::chrono::nanoseconds;

  /*! \brief Record that a message has made progress. */
  void Moved() { still_ = false; }
  /*! \brief Return whether there has been no progress for so long that the engine should sleep. */
  bool IsLong();
  /*! \brief Yield the processor, or sleep for longer the longer there has been no progress. */
  void Pause(const std::function<void(Nanoseconds)>& sleep);

 private:
  bool still_ = false;
  std::chrono::steady_clock::time_point since_;
  Nanoseconds still_for_{0};
};

/*!
 * \brief The sleep between polls while all messages in flight are sequential
 *        (core/internode_request_queue.h): a quarter of the time between the ends of two messages.
 * The kernel moves their bytes meanwhile, and the processor is free for computation.
 */
class SequentialBackoff {
 public:
  using Nanoseconds = std::chrono::nanoseconds;

  /*! \brief Record that messages have ended. */
  void Ended();
  /*! \brief Ignore the time until the next end. */
  void Interrupted() { known_ = false; }
  /*! \brief Return the sleep; 0 if messages end too fast, or the rate is not known yet. */
  Nanoseconds Length() const;

 private:
  bool known_ = false;
  std::chrono::steady_clock::time_point last_;
  Nanoseconds between_{0};
};

/*! \brief Move messages until `stopped` is set and the ring is woken. Messages in flight are
 *         abandoned. */
void Serve(EngineRing& ring, Transport& transport, const std::atomic<bool>& stopped);

}  // namespace tvm_ipc::engine
#endif  // TVM_IPC_ENGINE_INTERNODE_PROGRESS_ENGINE_H_
