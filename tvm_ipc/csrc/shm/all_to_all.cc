/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file all_to_all.cc
 * \brief All-to-all: part j of what rank i sends becomes part i of what rank j receives.
 *
 * Inputs in the arenas of all ranks are copied from where they lie between a step in and a step
 * out. Others go through the staging buffers, in pieces that have something of every part, and so
 * do small ones: one step is enough for these.
 */
#include <algorithm>

#include "shm/collectives.h"
#include "shm/team.h"

namespace tvm_ipc {

void AllToAll(Rank& rank, const Buffer& send, int team_id, uint8_t flags, const Buffer& recv) {
  if (send.type != recv.type || send.count != recv.count) {
    Fail(kind::kValue, "all_to_all: send has ", send.count, " x ", Name(send.type), ", recv has ",
         recv.count, " x ", Name(recv.type), "; they must be equal");
  }
  Team team(rank, team_id);
  const int n = team.size();
  const int me = team.index();
  if (send.count % n != 0) {
    Fail(kind::kValue, "all_to_all: ", send.count, " elements cannot be divided evenly among ", n,
         " workers");
  }
  if (send.Overlaps(recv)) {
    Fail(kind::kValue,
         "all_to_all: send and recv overlap, but peers read the one while the other"
         " is written; they must be apart");
  }
  const size_t part = send.bytes() / n;
  const bool stream = recv.bytes() >= kStreamBytes;
  Descriptor mine;
  mine.op = "all_to_all";
  mine.flags = flags;
  mine.type = send.type;
  mine.count = send.count;
  mine.offset = rank.OffsetOf(send.data, send.bytes());
  // Each begins with another peer, so that not all of them read the same memory.
  auto take = [&](int peer, const uint8_t* from, size_t at, size_t bytes) {
    if (peer == me) from = send.begin() + me * part + at;
    CopyBytes(recv.begin() + peer * part + at, from, bytes, stream);
  };
  if (n > 1 && send.bytes() > kEagerBytes) {
    team.Enter(mine);
    if (team.InArenas()) {
      for (int k = 0; k < n; ++k) {
        const int peer = (me + k) % n;
        take(peer, team.memory(peer, team.shown(peer).offset) + me * part, 0, part);
      }
      if (!(flags & kNoExitBarrier)) team.Enter(mine);
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
    for (int k = 0; k < n; ++k) {
      const int peer = (me + k) % n;
      take(peer, team.buffer(peer) + me * bytes, at, bytes);
    }
  }
}

}  // namespace tvm_ipc
