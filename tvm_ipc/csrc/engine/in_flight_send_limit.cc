/* SPDX-License-Identifier: Apache-2.0 */
/*! \file in_flight_send_limit.cc */
#include "engine/in_flight_send_limit.h"

namespace tvm_ipc::engine {

bool SendScheduler::Starts(const RingMessage& message) {
  if (message.sends == 0 || !IsSequential(message.tag)) return true;
  const auto stream = streams_.try_emplace({message.peer, message.tag}).first;
  if (stream->second.in_flight == kAtATime) {
    stream->second.held.push_back(message);
    return false;
  }
  ++stream->second.in_flight;
  in_flight_[{message.rank, message.request}] = stream;
  return true;
}

bool SendScheduler::Next(const Ended& ended, RingMessage* next) {
  if (in_flight_.empty()) return false;
  const auto entry = in_flight_.find({ended.rank, ended.request});
  if (entry == in_flight_.end()) return false;
  const Streams::iterator stream = entry->second;
  in_flight_.erase(entry);
  if (stream->second.held.empty()) {
    if (--stream->second.in_flight == 0) streams_.erase(stream);
    return false;
  }
  *next = stream->second.held.front();
  stream->second.held.pop_front();
  in_flight_[{next->rank, next->request}] = stream;
  return true;
}

void SendScheduler::Clear() {
  in_flight_.clear();
  streams_.clear();
}

}  // namespace tvm_ipc::engine
