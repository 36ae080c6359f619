/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file turns.h
 * \brief Messages that go in turn (core/wire.h): of those of one tag to one node two are sent at a
 *        time, so that one goes while the other one is agreed upon.
 *
 * Nobody waits in vain for one that is kept. Messages of one tag get to their receives in order, so
 * one that is sent lacks a receive only if a kept one does, too.
 */
#ifndef TVM_IPC_ENGINE_TURNS_H_
#define TVM_IPC_ENGINE_TURNS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <utility>

#include "core/engine_wire.h"
#include "engine/transport.h"

namespace tvm_ipc::engine {

/*! \brief How many messages that go in turn are sent at a time. */
constexpr int kAtATime = 2;

class Turns {
 public:
  /*! \brief Whether a message is to start now; else it is kept. */
  bool Starts(const WireWork& work);
  /*! \brief Whether one that was kept is to start now, since this one has ended. */
  bool Next(const Ended& ended, WireWork* next);
  /*! \brief Forget all of them: the session has recovered. */
  void Clear();

 private:
  struct Stream {
    int under_way = 0;
    std::deque<WireWork> kept;
  };
  /*! \brief By peer and tag. */
  using Streams = std::map<std::pair<int32_t, int32_t>, Stream>;

  Streams streams_;
  /*! \brief By rank and request: what is under way. */
  std::map<std::pair<int, int>, Streams::iterator> under_way_;
};

}  // namespace tvm_ipc::engine
#endif  // TVM_IPC_ENGINE_TURNS_H_
