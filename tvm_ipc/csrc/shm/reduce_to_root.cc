/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_to_root.cc
 * \brief Reduce: one member, the root, gets the result of an all-reduce.
 *
 * It uses the kernels and the order of all-reduce, so the results are bitwise identical. If the
 * inputs of all ranks are in arenas, they are read in place: up to kSharedBytes by the root,
 * between a step in and a step out. Of larger inputs every rank reduces a slice into its staging
 * buffer and the root copies the slices; the last step in protects the inputs. Otherwise inputs go
 * through the staging buffers, in pieces. So do small inputs, for which one step is enough.
 */
#include <algorithm>

#include "shm/collectives.h"

namespace tvm_ipc {

namespace {

/*! \brief Above this size it is faster if all ranks reduce. */
constexpr size_t kSharedBytes = 64 << 10;

}  // namespace

void Reduce(Team& team, const Call& call) {
  const Buffer& send = call.send;
  const Buffer& recv = call.recv;
  const ReduceFn reduce = RequireReduce("reduce", send.type, call.kind);
  const int n = team.size();
  const int me = team.index();
  const bool receives = me == call.root;
  const bool stream = send.bytes() >= kStreamBytes;
  const size_t width = send.type.bytes();
  const Descriptor mine = team.Describe(call);
  const void* sources[kMaxRanks];
  if (n > 1 && send.bytes() > kEagerBytes) {
    team.Enter(mine);
    if (team.InArenas()) {
      const uint8_t* inputs[kMaxRanks];
      for (int i = 0; i < n; ++i) inputs[i] = team.memory(i, team.exposed(i).offset);
      if (send.bytes() <= kSharedBytes) {
        for (int i = 0; i < n; ++i) sources[i] = inputs[i];
        if (receives) reduce(recv.data, sources, n, send.count, stream);
        if (!(call.flags & kNoExitBarrier)) team.Enter(mine);
        return;
      }
      const size_t slice = kStageBytes;
      for (size_t at = 0; at < send.bytes(); at += slice * n) {
        auto start = [&](int i) { return std::min(send.bytes(), at + slice * i); };
        for (int i = 0; i < n; ++i) sources[i] = inputs[i] + start(me);
        reduce(team.NextBuffer(), sources, n, (start(me + 1) - start(me)) / width, false);
        team.Enter(mine);
        for (int i = 0; receives && i < n; ++i) {
          CopyBytes(recv.begin() + start(i), team.buffer(i), start(i + 1) - start(i), stream);
        }
      }
      return;
    }
  }
  for (size_t at = 0; at < send.bytes() || at == 0; at += kStageBytes) {
    const size_t bytes = std::min(kStageBytes, send.bytes() - at);
    if (!receives) CopyBytes(team.NextBuffer(), send.begin() + at, bytes, false);
    team.Enter(mine);
    for (int i = 0; i < n; ++i) sources[i] = team.buffer(i);
    sources[me] = send.begin() + at;
    if (receives) reduce(recv.begin() + at, sources, n, bytes / width, stream);
  }
}

}  // namespace tvm_ipc
