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

#include "shm/argument_checks.h"
#include "shm/collectives.h"
#include "shm/team_operation.h"

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

Descriptor Describe(Rank& rank, const OpName& op, const Buffer* source, ElementType type,
                    size_t count, uint8_t flags, int root = -1) {
  Descriptor descriptor;
  descriptor.op = op;
  descriptor.flags = flags;
  descriptor.type = type;
  descriptor.count = count;
  descriptor.root = root;
  if (source != nullptr) descriptor.offset = rank.OffsetOf(source->data, source->bytes());
  return descriptor;
}

void Copy(uint8_t* to, const uint8_t* from, size_t bytes, bool stream) {
  if (to != from) CopyBytes(to, from, bytes, stream);
}

}  // namespace

void AllGather(Rank& rank, const Buffer& send, TeamId team_id, uint8_t flags, const Buffer& recv) {
  Team team(rank, team_id);
  CheckAllGather(send, recv, {team.size(), team.index()});
  const size_t chunk = send.bytes();
  const bool stream = recv.bytes() >= kStreamBytes;
  Run({team, Describe(rank, "allgather", &send, send.type, send.count, flags), -1, send.begin(),
       chunk, 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         Copy(recv.begin() + member * chunk + at, from, bytes, stream);
       },
       0});
}

void Broadcast(Rank& rank, const Buffer* send, int root, TeamId team_id, uint8_t flags,
               const Buffer& recv) {
  Team team(rank, team_id);
  CheckRoot("broadcast", root, team.size());
  const bool sends = team.index() == root;
  CheckBroadcast(send, sends, recv);
  const Buffer* source = sends ? send : nullptr;
  const bool stream = recv.bytes() >= kStreamBytes;
  Run({team, Describe(rank, "broadcast", source, recv.type, recv.count, flags, team.rank(root)),
       root, sends ? send->begin() : nullptr, recv.bytes(), 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         if (sends) from = send->begin() + at;
         Copy(recv.begin() + at, from, bytes, stream);
       },
       0});
}

void Scatter(Rank& rank, const Buffer* send, int root, TeamId team_id, uint8_t flags,
             const Buffer& recv) {
  Team team(rank, team_id);
  CheckRoot("scatter", root, team.size());
  const bool sends = team.index() == root;
  const size_t chunk = static_cast<size_t>(team.index());
  CheckScatter(send, sends, recv, {team.size(), team.index()});
  const Buffer* source = sends ? send : nullptr;
  const bool stream = recv.bytes() >= kStreamBytes;
  Run({team, Describe(rank, "scatter", source, recv.type, recv.count, flags, team.rank(root)), root,
       sends ? send->begin() : nullptr, recv.bytes(), static_cast<size_t>(team.size()),
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         Copy(recv.begin() + at, from, bytes, stream);
       },
       chunk});
}

void Gather(Rank& rank, const Buffer& send, int root, TeamId team_id, uint8_t flags,
            const Buffer* recv) {
  Team team(rank, team_id);
  CheckRoot("gather", root, team.size());
  const bool receives = team.index() == root;
  CheckGather(send, receives, recv, {team.size(), team.index()});
  const size_t chunk = send.bytes();
  Run({team, Describe(rank, "gather", &send, send.type, send.count, flags, team.rank(root)), -1,
       send.begin(), chunk, 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         if (!receives) return;
         Copy(recv->begin() + member * chunk + at, from, bytes, recv->bytes() >= kStreamBytes);
       },
       0});
}

void Permute(Rank& rank, const Buffer& send, const Sources& sources, TeamId team_id, uint8_t flags,
             const Buffer& recv) {
  Team team(rank, team_id);
  CheckPermute(send, sources, recv, {team.size(), team.index()});
  const int64_t wanted = sources[team.index()];
  const bool stream = recv.bytes() >= kStreamBytes;
  Descriptor mine = Describe(rank, "permute", &send, send.type, send.count, flags);
  mine.layout_hash = HashOf(sources);
  Run({team, mine, -1, send.begin(), send.bytes(), 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         if (member == wanted) CopyBytes(recv.begin() + at, from, bytes, stream);
       },
       0});
  if (wanted < 0) std::fill_n(recv.begin(), recv.bytes(), uint8_t{0});
}

}  // namespace tvm_ipc
