/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file all_to_all.cc
 * \brief All-to-all: slice j of the input of rank i becomes slice i of the output of rank j.
 *
 * If the inputs of all ranks are in arenas, they are read in place between a step in and a step
 * out. Otherwise they go through the staging buffers, in pieces that contain a part of every slice.
 * So do small inputs, for which one step is enough.
 */
#include <algorithm>

#include "core/all_to_all_layout.h"
#include "shm/collectives.h"

namespace tvm_ipc {

void AllToAll(Team& team, const Call& call) {
  const Buffer& send = call.send;
  const Buffer& recv = call.recv;
  const int n = team.size();
  const int me = team.index();
  const Division division(send, call.layout, n);
  const bool stream = recv.bytes() >= kStreamBytes;
  const Descriptor mine = team.Describe(call);
  auto take = [&](int peer, const uint8_t* from, size_t at, size_t bytes) {
    CopyBytes(recv.begin() + division.recv_offset(peer, me) + at, from, bytes, stream);
  };
  auto take_own = [&] {
    take(me, send.begin() + division.before(me, me), 0, division.part(me, me));
  };
  if (n > 1 && division.most_sent() > kEagerBytes) {
    team.Enter(mine);
    if (team.InArenas()) {
      take_own();
      for (int k = 1; k < n; ++k) {  // each begins with a different peer, since all read at once
        const int peer = (me + k) % n;
        const uint8_t* memory = team.memory(peer, team.exposed(peer).offset);
        take(peer, memory + division.before(peer, me), 0, division.part(peer, me));
      }
      if (!(call.flags & kNoExitBarrier)) team.Enter(mine);
      return;
    }
  }
  take_own();
  const size_t most = kStageBytes / n / kLine * kLine;
  const size_t longest = division.longest();
  for (size_t at = 0; at < longest || at == 0; at += most) {
    for (int i = 0; i < n; ++i) {
      if (i == me) continue;
      CopyBytes(team.NextBuffer() + division.before(me, i, at, most),
                send.begin() + division.before(me, i) + at, division.piece(me, i, at, most), false);
    }
    team.Enter(mine);
    for (int k = 1; k < n; ++k) {
      const int peer = (me + k) % n;
      take(peer, team.buffer(peer) + division.before(peer, me, at, most), at,
           division.piece(peer, me, at, most));
    }
  }
}

}  // namespace tvm_ipc
