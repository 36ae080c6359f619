/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_scatter.cc
 * \brief Reduce-scatter: each rank reduces its own slice of the inputs of all ranks.
 *
 * It uses the kernels and the order of all-reduce, so the results are bitwise identical. If the
 * inputs of all ranks are in arenas, they are read in place between a step in and a step out.
 * Otherwise they go through the staging buffers, in pieces that contain a part of every slice. So
 * do small inputs, for which one step is enough. A rank reads only its own slice of any input, so
 * its result may replace that slice of its own input.
 */
#include <algorithm>

#include "shm/collectives.h"

namespace tvm_ipc {

void ReduceScatter(Team& team, const Call& call) {
  const Buffer& send = call.send;
  const Buffer& recv = call.recv;
  const ReduceFn reduce = RequireReduce("reduce_scatter", send.type, call.kind);
  const int n = team.size();
  const int me = team.index();
  const size_t part = recv.bytes();
  const uint8_t* own = send.begin() + me * part;
  const bool stream = part >= kStreamBytes;
  const Descriptor mine = team.Describe(call);
  const void* sources[kMaxRanks];
  if (n > 1 && send.bytes() > kEagerBytes) {
    team.Enter(mine);
    if (team.InArenas()) {
      for (int i = 0; i < n; ++i) sources[i] = team.memory(i, team.exposed(i).offset) + me * part;
      reduce(recv.data, sources, n, recv.count, stream);
      if (!(call.flags & kNoExitBarrier)) team.Enter(mine);
      return;
    }
  }
  const size_t piece = kStageBytes / n / kLine * kLine;
  for (size_t at = 0; at < part || at == 0; at += piece) {
    const size_t bytes = std::min(piece, part - at);
    for (int i = 0; i < n; ++i) {
      if (i == me) continue;
      CopyBytes(team.NextBuffer() + i * bytes, send.begin() + i * part + at, bytes, false);
    }
    team.Enter(mine);
    for (int i = 0; i < n; ++i) sources[i] = team.buffer(i) + me * bytes;
    sources[me] = own + at;
    reduce(recv.begin() + at, sources, n, bytes / send.type.bytes(), stream);
  }
}

}  // namespace tvm_ipc
