/* SPDX-License-Identifier: Apache-2.0 */
/*! \file turns.cc */
#include "engine/turns.h"

namespace tvm_ipc::engine {

bool Turns::Starts(const WireWork& work) {
  if (work.sends == 0 || !GoInTurn(work.tag)) return true;
  const auto stream = streams_.try_emplace({work.peer, work.tag}).first;
  if (stream->second.under_way == kAtATime) {
    stream->second.kept.push_back(work);
    return false;
  }
  ++stream->second.under_way;
  under_way_[{work.rank, work.request}] = stream;
  return true;
}

bool Turns::Next(const Ended& ended, WireWork* next) {
  if (under_way_.empty()) return false;
  const auto found = under_way_.find({ended.rank, ended.request});
  if (found == under_way_.end()) return false;
  const Streams::iterator stream = found->second;
  under_way_.erase(found);
  if (stream->second.kept.empty()) {
    if (--stream->second.under_way == 0) streams_.erase(stream);
    return false;
  }
  *next = stream->second.kept.front();
  stream->second.kept.pop_front();
  under_way_[{next->rank, next->request}] = stream;
  return true;
}

void Turns::Clear() {
  under_way_.clear();
  streams_.clear();
}

}  // namespace tvm_ipc::engine
