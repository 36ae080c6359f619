/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file transport.h
 * \brief What moves messages between nodes: all that an engine has to be. Another one is a file
 * with a class like this.
 */
#ifndef TVM_IPC_ENGINE_TRANSPORT_H_
#define TVM_IPC_ENGINE_TRANSPORT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/engine_wire.h"

namespace tvm_ipc::engine {

/*! \brief A message that has ended: whose, and how many bytes it had. */
struct Ended {
  int rank;
  int request;
  uint64_t came;
};

/*! \brief One thread uses it. What goes wrong is thrown, and ends the engine. */
class Transport {
 public:
  virtual ~Transport() = default;

  /*! \brief How many messages are under way. */
  virtual size_t busy() const = 0;
  /*! \brief How many of these go in turn (core/wire.h): nobody hurries them. */
  virtual size_t in_turn() const = 0;
  /*! \brief Begin to send or to receive; messages of one tag to a node arrive in this order. */
  virtual void Start(const WireWork& work) = 0;
  /*! \brief Add those that have ended since. */
  virtual void Progress(std::vector<Ended>* ended) = 0;
  /*!
   * \brief Return when nothing is under way, here and towards here, of what was before this
   *        recovery; false if it was stopped. All nodes do it, once for each recovery, in order.
   */
  virtual bool Flush(uint32_t generation, const std::atomic<bool>& stopped) = 0;
};

}  // namespace tvm_ipc::engine
#endif  // TVM_IPC_ENGINE_TRANSPORT_H_
