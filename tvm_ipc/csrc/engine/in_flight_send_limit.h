/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file in_flight_send_limit.h
 * \brief Schedules sequential messages (core/internode_request_queue.h): of one tag to one node at
 * most two are sent at a time, so that one is transferred during the handshake of the other.
 *
 * Holding messages back cannot deadlock. Messages of one tag match receives in order, so a message
 * in flight lacks a receive only if the held ones do too.
 */
#ifndef TVM_IPC_ENGINE_IN_FLIGHT_SEND_LIMIT_H_
#define TVM_IPC_ENGINE_IN_FLIGHT_SEND_LIMIT_H_

#include <cstdint>
#include <deque>
#include <map>
#include <utility>

#include "core/internode_request_queue_engine_side.h"
#include "engine/transport.h"

namespace tvm_ipc::engine {

/*! \brief The number of sequential messages of a stream that are sent at a time. */
constexpr int kAtATime = 2;

class SendScheduler {
 public:
  /*! \brief Return whether to start a message now; otherwise it is held back. */
  bool Starts(const RingMessage& message);
  /*! \brief Get the held message to start now that another has ended, if any. */
  bool Next(const Ended& ended, RingMessage* next);
  /*! \brief Drop all messages: the session has recovered. */
  void Clear();

 private:
  struct Stream {
    int in_flight = 0;
    std::deque<RingMessage> held;
  };
  /*! \brief The streams, by peer and tag. */
  using Streams = std::map<std::pair<int32_t, int32_t>, Stream>;

  Streams streams_;
  /*! \brief The messages in flight, by rank and request. */
  std::map<std::pair<int, int>, Streams::iterator> in_flight_;
};

}  // namespace tvm_ipc::engine
#endif  // TVM_IPC_ENGINE_IN_FLIGHT_SEND_LIMIT_H_
