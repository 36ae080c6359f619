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

void RequireType(const char* op, const Buffer& send, const Buffer& recv) {
  if (send.type != recv.type) {
    Fail(kind::kValue, op, ": send is ", Name(send.type), ", recv is ", Name(recv.type));
  }
}

/*! \brief Peers may still read `send` while `recv` is written, so they may only be equal. */
void RequireApart(const char* op, const Buffer& send, const Buffer& recv, const uint8_t* place) {
  // Gathers fill recv around send; scatter and broadcast leave a part of send where it was.
  if (send.Overlaps(recv) && place != (send.bytes() < recv.bytes() ? send.begin() : recv.begin())) {
    Fail(kind::kValue, op, ": send and recv overlap, but not where the data stays in its place");
  }
}

void Copy(uint8_t* to, const uint8_t* from, size_t bytes, bool stream) {
  if (to != from) CopyBytes(to, from, bytes, stream);
}

}  // namespace

void AllGather(Rank& rank, const Buffer& send, TeamId team_id, uint8_t flags, const Buffer& recv) {
  RequireType("allgather", send, recv);
  Team team(rank, team_id);
  if (recv.count != send.count * team.size()) {
    Fail(kind::kValue, "allgather: recv has ", recv.count, " elements, needed are ", team.size(),
         " x ", send.count);
  }
  const size_t part = send.bytes();
  RequireApart("allgather", send, recv, recv.begin() + team.index() * part);
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
  team.RequireRoot("broadcast", root);
  const bool sends = team.index() == root;
  if (sends) {
    if (send == nullptr) Fail(kind::kValue, "broadcast: the root has nothing to send");
    RequireType("broadcast", *send, recv);
    if (send->count != recv.count) {
      Fail(kind::kValue, "broadcast: send has ", send->count, " elements, recv has ", recv.count);
    }
    RequireApart("broadcast", *send, recv, send->begin());
  }
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
  team.RequireRoot("scatter", root);
  const bool sends = team.index() == root;
  const size_t part = static_cast<size_t>(team.index());
  if (sends) {
    if (send == nullptr) Fail(kind::kValue, "scatter: the root has nothing to send");
    RequireType("scatter", *send, recv);
    if (send->count % team.size() != 0) {
      Fail(kind::kValue, "scatter: ", send->count, " elements cannot be divided evenly among ",
           team.size(), " workers");
    }
    if (send->count / team.size() != recv.count) {
      Fail(kind::kValue, "scatter: a part of send has ", send->count / team.size(),
           " elements, recv has ", recv.count);
    }
    RequireApart("scatter", *send, recv, send->begin() + part * recv.bytes());
  }
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
  team.RequireRoot("gather", root);
  const bool receives = team.index() == root;
  if (receives) {
    if (recv == nullptr) Fail(kind::kValue, "gather: the root has nowhere to receive");
    RequireType("gather", send, *recv);
    if (recv->count != send.count * team.size()) {
      Fail(kind::kValue, "gather: recv has ", recv->count, " elements, needed are ", team.size(),
           " x ", send.count);
    }
    RequireApart("gather", send, *recv, recv->begin() + root * send.bytes());
  }
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
  if (send.type != recv.type || send.count != recv.count) {
    Fail(kind::kValue, "permute: send has ", send.count, " x ", Name(send.type), ", recv has ",
         recv.count, " x ", Name(recv.type), "; they must be equal");
  }
  if (sources.size() != static_cast<size_t>(team.size())) {
    Fail(kind::kValue, "permute: ", sources.size(), " sources for a team of ", team.size(),
         "; each member has one, -1 for none");
  }
  for (int64_t source : sources) {
    if (source < -1 || source >= team.size()) {
      Fail(kind::kValue, "permute: there is no source ", source, " in a team of ", team.size(),
           "; it is a place in the team, from 0 on, or -1 for none");
    }
  }
  if (send.Overlaps(recv)) {
    Fail(kind::kValue,
         "permute: send and recv overlap, but peers read the one while the other is written; they"
         " must be apart");
  }
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
