/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file collectives.cc
 * \brief Collectives that only move data.
 *
 * All of them are one pattern: some members show bytes, others copy what is theirs. Whoever shows
 * bytes in its arena has them read where they lie in the first step; then comes an exit step, which
 * the caller may promise away. Bytes elsewhere, and few ones, go through its staging buffers, one
 * step for each piece (`Team` says why no exit step is needed then).
 */
#include "shm/collectives.h"

#include <algorithm>
#include <functional>

#include "shm/checks.h"
#include "shm/team.h"

namespace tvm_ipc {

namespace {

/*! \brief One collective in terms of parts: every shower shows `parts` runs of `part` bytes. */
struct Move {
  Team& team;
  Descriptor descriptor;
  /*! \brief Who shows something; -1 is everybody. */
  int root;
  const uint8_t* source;
  /*! \brief Bytes of one part; a shower's input is `parts` of them, one after the other. */
  size_t part;
  size_t parts;
  /*! \brief Copy bytes [at, at + bytes) of a part that `member` shows at `from`. */
  std::function<void(int member, const uint8_t* from, size_t at, size_t bytes)> take;
  /*! \brief The part of a shower's input that this member takes. */
  size_t wanted_part;
};

bool Shows(const Move& move, int member) { return move.root < 0 || member == move.root; }

void Run(Move move) {
  Team& team = move.team;
  // To stage so few takes less time than the exit step that is needed where they are read in place.
  if (move.part * move.parts <= kEagerBytes) move.descriptor.offset = -1;
  const bool stages = Shows(move, team.index()) && move.descriptor.offset < 0;
  // Whole lines, so that copies stay aligned.
  const size_t piece = kStageBytes / move.parts / kLine * kLine;
  bool in_place = false, staged = false;
  size_t at = 0;
  do {
    const size_t bytes = std::min(piece, move.part - at);
    for (size_t p = 0; stages && p < move.parts; ++p) {
      CopyBytes(team.NextBuffer() + p * bytes, move.source + p * move.part + at, bytes, false);
    }
    team.Enter(move.descriptor);
    for (int k = 0; k < team.size(); ++k) {
      const int member = (team.index() + k) % team.size();
      if (!Shows(move, member)) continue;
      const int64_t offset = team.shown(member).offset;
      if (offset < 0) {
        move.take(member, team.buffer(member) + move.wanted_part * bytes, at, bytes);
        staged = true;
      } else if (at == 0) {
        move.take(member, team.memory(member, offset) + move.wanted_part * move.part, 0, move.part);
        in_place = true;
      }
    }
    at += piece;
  } while (staged && at < move.part);
  // A second piece was a step after all had read in place.
  const bool left = at > piece || (move.descriptor.flags & kNoExitBarrier) != 0;
  if (in_place && !left) team.Enter(move.descriptor);
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
  const size_t part = send.bytes();
  const bool stream = recv.bytes() >= kStreamBytes;
  Run({team, Describe(rank, "allgather", &send, send.type, send.count, flags), -1, send.begin(),
       part, 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         Copy(recv.begin() + member * part + at, from, bytes, stream);
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
  const size_t part = static_cast<size_t>(team.index());
  CheckScatter(send, sends, recv, {team.size(), team.index()});
  const Buffer* source = sends ? send : nullptr;
  const bool stream = recv.bytes() >= kStreamBytes;
  Run({team, Describe(rank, "scatter", source, recv.type, recv.count, flags, team.rank(root)), root,
       sends ? send->begin() : nullptr, recv.bytes(), static_cast<size_t>(team.size()),
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         Copy(recv.begin() + at, from, bytes, stream);
       },
       part});
}

void Gather(Rank& rank, const Buffer& send, int root, TeamId team_id, uint8_t flags,
            const Buffer* recv) {
  Team team(rank, team_id);
  CheckRoot("gather", root, team.size());
  const bool receives = team.index() == root;
  CheckGather(send, receives, recv, {team.size(), team.index()});
  const size_t part = send.bytes();
  Run({team, Describe(rank, "gather", &send, send.type, send.count, flags, team.rank(root)), -1,
       send.begin(), part, 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         if (!receives) return;
         Copy(recv->begin() + member * part + at, from, bytes, recv->bytes() >= kStreamBytes);
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
  mine.parts = HashOf(sources);
  Run({team, mine, -1, send.begin(), send.bytes(), 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         if (member == wanted) CopyBytes(recv.begin() + at, from, bytes, stream);
       },
       0});
  if (wanted < 0) std::fill_n(recv.begin(), recv.bytes(), uint8_t{0});
}

}  // namespace tvm_ipc
