/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file engine.h
 * \brief The engine of a node: moves what its ranks have posted to other nodes, and what comes to
 *        them.
 *
 * Ranks post messages in shared memory (core/wire.h); a thread of the node's agent takes them,
 * gives them to a transport, and says when each is done. Bytes go straight out of the ranks' memory
 * and into it.
 *
 * When the session has recovered from an error, messages of before may still be on their way. All
 * engines flush them then, and ranks may post again (`Control::flushed`).
 */
#ifndef TVM_IPC_ENGINE_ENGINE_H_
#define TVM_IPC_ENGINE_ENGINE_H_

#include <atomic>
#include <chrono>
#include <functional>

#include "core/engine_wire.h"
#include "engine/transport.h"

namespace tvm_ipc::engine {

/*! \brief Leaves the processor to others while nothing moves, for longer if nothing has for longer.
 */
class Pauses {
 public:
  using Nanoseconds = std::chrono::nanoseconds;

  /*! \brief Something has moved. */
  void Moved() { still_ = false; }
  /*! \brief Whether nothing has moved for so long that it is time to sleep. */
  bool Long();
  /*! \brief Offer the processor to others, or sleep for longer the longer nothing has moved. */
  void Pause(const std::function<void(Nanoseconds)>& sleep);

 private:
  bool still_ = false;
  std::chrono::steady_clock::time_point since_;
  Nanoseconds still_for_{0};
};

/*!
 * \brief How long to sleep between looks while all that is under way goes in turn (core/wire.h): a
 *        quarter of the time from the end of one message to that of the next. The kernel moves them
 *        meanwhile, and the processor is left to those who compute beside it.
 */
class Naps {
 public:
  using Nanoseconds = std::chrono::nanoseconds;

  /*! \brief Some have ended. */
  void Ended();
  /*! \brief The time until the next end says nothing. */
  void Interrupted() { known_ = false; }
  /*! \brief 0: they end too fast for that, or it is not known yet how fast. */
  Nanoseconds Length() const;

 private:
  bool known_ = false;
  std::chrono::steady_clock::time_point last_;
  Nanoseconds between_{0};
};

/*! \brief Move messages until it is stopped; who stops it rings. What is under way then stays where
 *         it is. */
void Serve(EngineWire& wire, Transport& transport, const std::atomic<bool>& stopped);

}  // namespace tvm_ipc::engine
#endif  // TVM_IPC_ENGINE_ENGINE_H_
