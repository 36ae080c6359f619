/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file transport.h
 * \brief The interface of a transport, which moves messages between nodes. Another transport is a
 *        file with a class that implements it.
 */
#ifndef TVM_IPC_ENGINE_TRANSPORT_H_
#define TVM_IPC_ENGINE_TRANSPORT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/internode_request_queue_engine_side.h"

namespace tvm_ipc::engine {

/*! \brief A message that has ended: its rank and request, and how many bytes it had. */
struct Ended {
  int rank;
  int request;
  uint64_t received;
};

/*! \brief Used by one thread. Errors are thrown and end the engine. */
class Transport {
 public:
  virtual ~Transport() = default;

  /*! \brief Return the number of messages in flight. */
  virtual size_t in_flight() const = 0;
  /*! \brief Return how many of them are sequential (core/internode_request_queue.h) and need no
   *         frequent polling. */
  virtual size_t sequential() const = 0;
  /*! \brief Start a send or a receive. Messages of one tag to a node arrive in this order. */
  virtual void Start(const RingMessage& message) = 0;
  /*! \brief Append the messages that have ended since the last call. */
  virtual void Progress(std::vector<Ended>* ended) = 0;
  /*!
   * \brief Wait until no message from before this recovery is in flight, from or to this node;
   *        return false if stopped. All nodes call it once for each recovery, in order.
   */
  virtual bool Flush(uint32_t generation, const std::atomic<bool>& stopped) = 0;
};

}  // namespace tvm_ipc::engine
#endif  // TVM_IPC_ENGINE_TRANSPORT_H_
