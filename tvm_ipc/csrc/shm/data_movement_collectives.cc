/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file data_movement_collectives.cc
 * \brief Collectives that only move data.
 *
 * They share one pattern: some members, the sources, expose bytes, and others copy their share. If
 * a source's bytes are in its arena, peers read them in place in the first step. An exit step
 * follows, unless the caller promises that it is not needed. Private or small inputs go through the
 * staging buffers, one step for each piece, and need no exit step (`TeamBarrier`).
 */
#include <algorithm>
#include <functional>

#include "shm/collectives.h"

namespace tvm_ipc {

namespace {

/*! \brief One collective in terms of chunks: every source exposes `chunks` of `chunk` bytes. */
struct Move {
  Team& team;
  Descriptor descriptor;
  /*! \brief The team index of the only source; -1 if every member is one. */
  int root;
  const uint8_t* source;
  /*! \brief Bytes of a chunk. A source's input is `chunks` of them, one after the other. */
  size_t chunk;
  size_t chunks;
  /*! \brief Copy bytes [at, at + bytes) of the chunk from `from`, which `member` exposes. */
  std::function<void(int member, const uint8_t* from, size_t at, size_t bytes)> copy;
  /*! \brief The chunk of each source's input that this member copies. */
  size_t wanted_chunk;
};

bool IsSource(const Move& move, int member) { return move.root < 0 || member == move.root; }

void Run(Move move) {
  Team& team = move.team;
  // Staging small inputs costs less than the exit step that reading in place needs.
  if (move.chunk * move.chunks <= kEagerBytes) move.descriptor.offset = -1;
  const bool stages = IsSource(move, team.index()) && move.descriptor.offset < 0;
  // Whole cache lines, so that copies stay aligned.
  const size_t piece = kStageBytes / move.chunks / kLine * kLine;
  bool in_place = false, staged = false;
  size_t at = 0;
  do {
    const size_t bytes = std::min(piece, move.chunk - at);
    for (size_t p = 0; stages && p < move.chunks; ++p) {
      CopyBytes(team.NextBuffer() + p * bytes, move.source + p * move.chunk + at, bytes, false);
    }
    team.Enter(move.descriptor);
    for (int k = 0; k < team.size(); ++k) {
      const int member = (team.index() + k) % team.size();
      if (!IsSource(move, member)) continue;
      const int64_t offset = team.exposed(member).offset;
      if (offset < 0) {
        move.copy(member, team.buffer(member) + move.wanted_chunk * bytes, at, bytes);
        staged = true;
      } else if (at == 0) {
        move.copy(member, team.memory(member, offset) + move.wanted_chunk * move.chunk, 0,
                  move.chunk);
        in_place = true;
      }
    }
    at += piece;
  } while (staged && at < move.chunk);
  // With a second piece, its step came after all in-place reads.
  const bool no_exit = at > piece || (move.descriptor.flags & kNoExitBarrier) != 0;
  if (in_place && !no_exit) team.Enter(move.descriptor);
}

void Copy(uint8_t* to, const uint8_t* from, size_t bytes, bool stream) {
  if (to != from) CopyBytes(to, from, bytes, stream);
}

}  // namespace

void AllGather(Team& team, const Call& call) {
  const Buffer& recv = call.recv;
  const size_t chunk = call.send.bytes();
  const bool stream = recv.bytes() >= kStreamBytes;
  Run({team, team.Describe(call), -1, call.send.begin(), chunk, 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         Copy(recv.begin() + member * chunk + at, from, bytes, stream);
       },
       0});
}

void Broadcast(Team& team, const Call& call) {
  const Buffer& recv = call.recv;
  const bool sends = team.index() == call.root;
  const bool stream = recv.bytes() >= kStreamBytes;
  Run({team, team.Describe(call), call.root, call.send.begin(), recv.bytes(), 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         if (sends) from = call.send.begin() + at;
         Copy(recv.begin() + at, from, bytes, stream);
       },
       0});
}

void Scatter(Team& team, const Call& call) {
  const Buffer& recv = call.recv;
  const size_t chunk = static_cast<size_t>(team.index());
  const bool stream = recv.bytes() >= kStreamBytes;
  Run({team, team.Describe(call), call.root, call.send.begin(), recv.bytes(),
       static_cast<size_t>(team.size()),
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         Copy(recv.begin() + at, from, bytes, stream);
       },
       chunk});
}

void Gather(Team& team, const Call& call) {
  const Buffer& recv = call.recv;
  const bool receives = team.index() == call.root;
  const size_t chunk = call.send.bytes();
  Run({team, team.Describe(call), -1, call.send.begin(), chunk, 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         if (!receives) return;
         Copy(recv.begin() + member * chunk + at, from, bytes, recv.bytes() >= kStreamBytes);
       },
       0});
}

void Permute(Team& team, const Call& call) {
  const Buffer& recv = call.recv;
  const NumberView& sources = call.layout;
  const int64_t wanted = sources[team.index()];
  const bool stream = recv.bytes() >= kStreamBytes;
  Run({team, team.Describe(call), -1, call.send.begin(), call.send.bytes(), 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         if (member == wanted) CopyBytes(recv.begin() + at, from, bytes, stream);
       },
       0});
  if (wanted < 0) std::fill_n(recv.begin(), recv.bytes(), uint8_t{0});
}

}  // namespace tvm_ipc
