/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file collectives.cc
 * \brief Collectives that only move data.
 *
 * All four are one pattern: some members show bytes, others copy what is theirs. Shown bytes that
 * lie in the arenas of all who show, and are more than a staging buffer holds, are read in place
 * between an entry and an exit step; anything else goes through the staging buffers, one step for
 * each piece (`Team` says why no exit step is needed then).
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
  /*! \brief Whether this member, and whether only the first member, shows anything. */
  bool shows;
  bool root_only;
  const uint8_t* source;
  /*! \brief Bytes of one part; a shower's input is `parts` of them, one after the other. */
  size_t part;
  size_t parts;
  /*! \brief Copy bytes [at, at + bytes) of a part that `member` shows at `from`. */
  std::function<void(int member, const uint8_t* from, size_t at, size_t bytes)> take;
  /*! \brief The part of a shower's input that this member takes. */
  size_t wanted_part;
};

bool Shows(const Move& move, int member) { return !move.root_only || member == 0; }

void TakeAll(const Move& move, size_t at, size_t bytes,
             const std::function<const uint8_t*(int)>& from) {
  for (int k = 0; k < move.team.size(); ++k) {
    const int member = (move.team.index() + k) % move.team.size();
    if (Shows(move, member)) move.take(member, from(member), at, bytes);
  }
}

void Run(const Move& move) {
  Team& team = move.team;
  // Whole lines, so that copies stay aligned.
  const size_t piece = kStageBytes / move.parts / kLine * kLine;
  if (move.part > piece) {
    team.Enter(move.descriptor);
    bool in_place = true;
    for (int i = 0; i < team.size(); ++i) {
      in_place = in_place && (!Shows(move, i) || team.shown(i).offset >= 0);
    }
    if (in_place) {
      TakeAll(move, 0, move.part, [&](int member) {
        return team.memory(member, team.shown(member).offset) + move.wanted_part * move.part;
      });
      team.Enter(move.descriptor);
      return;
    }
  }
  for (size_t at = 0; at < move.part || at == 0; at += piece) {
    const size_t bytes = std::min(piece, move.part - at);
    if (move.shows) {
      for (size_t p = 0; p < move.parts; ++p) {
        CopyBytes(team.NextBuffer() + p * bytes, move.source + p * move.part + at, bytes, false);
      }
    }
    team.Enter(move.descriptor);
    TakeAll(move, at, bytes,
            [&](int member) { return team.buffer(member) + move.wanted_part * bytes; });
  }
}

Descriptor Describe(Rank& rank, const OpName& op, const Buffer* source, ElementType type,
                    size_t count, int root) {
  Descriptor descriptor;
  descriptor.op = op;
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

void AllGather(Rank& rank, const Buffer& send, int team_id, const Buffer& recv) {
  RequireType("allgather", send, recv);
  Team team(rank, team_id);
  if (recv.count != send.count * team.size()) {
    Fail(kind::kValue, "allgather: recv has ", recv.count, " elements, needed are ", team.size(),
         " x ", send.count);
  }
  const size_t part = send.bytes();
  RequireApart("allgather", send, recv, recv.begin() + team.index() * part);
  const bool stream = recv.bytes() >= kStreamBytes;
  Run({team, Describe(rank, "allgather", &send, send.type, send.count, -1), true, false,
       send.begin(), part, 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         Copy(recv.begin() + member * part + at, from, bytes, stream);
       },
       0});
}

void Broadcast(Rank& rank, const Buffer* send, int team_id, const Buffer& recv) {
  Team team(rank, team_id);
  const bool root = team.index() == 0;
  if (root) {
    if (send == nullptr) Fail(kind::kValue, "broadcast: the first rank has nothing to send");
    RequireType("broadcast", *send, recv);
    if (send->count != recv.count) {
      Fail(kind::kValue, "broadcast: send has ", send->count, " elements, recv has ", recv.count);
    }
    RequireApart("broadcast", *send, recv, send->begin());
  }
  const Buffer* source = root ? send : nullptr;
  const bool stream = recv.bytes() >= kStreamBytes;
  Run({team, Describe(rank, "broadcast", source, recv.type, recv.count, team.rank(0)), root, true,
       root ? send->begin() : nullptr, recv.bytes(), 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         if (root) from = send->begin() + at;
         Copy(recv.begin() + at, from, bytes, stream);
       },
       0});
}

void Scatter(Rank& rank, const Buffer* send, int team_id, const Buffer& recv) {
  Team team(rank, team_id);
  const bool root = team.index() == 0;
  if (root) {
    if (send == nullptr) Fail(kind::kValue, "scatter: the first rank has nothing to send");
    RequireType("scatter", *send, recv);
    if (send->count % team.size() != 0) {
      Fail(kind::kValue, "scatter: ", send->count, " elements cannot be divided evenly among ",
           team.size(), " workers");
    }
    if (send->count / team.size() != recv.count) {
      Fail(kind::kValue, "scatter: a part of send has ", send->count / team.size(),
           " elements, recv has ", recv.count);
    }
    RequireApart("scatter", *send, recv, send->begin());
  }
  const Buffer* source = root ? send : nullptr;
  const bool stream = recv.bytes() >= kStreamBytes;
  Run({team, Describe(rank, "scatter", source, recv.type, recv.count, team.rank(0)), root, true,
       root ? send->begin() : nullptr, recv.bytes(), static_cast<size_t>(team.size()),
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         Copy(recv.begin() + at, from, bytes, stream);
       },
       static_cast<size_t>(team.index())});
}

void Gather(Rank& rank, const Buffer& send, int team_id, const Buffer* recv) {
  Team team(rank, team_id);
  const bool root = team.index() == 0;
  if (root) {
    if (recv == nullptr) Fail(kind::kValue, "gather: the first rank has nowhere to receive");
    RequireType("gather", send, *recv);
    if (recv->count != send.count * team.size()) {
      Fail(kind::kValue, "gather: recv has ", recv->count, " elements, needed are ", team.size(),
           " x ", send.count);
    }
    RequireApart("gather", send, *recv, recv->begin());
  }
  const size_t part = send.bytes();
  Run({team, Describe(rank, "gather", &send, send.type, send.count, team.rank(0)), true, false,
       send.begin(), part, 1,
       [&](int member, const uint8_t* from, size_t at, size_t bytes) {
         if (!root) return;
         Copy(recv->begin() + member * part + at, from, bytes, recv->bytes() >= kStreamBytes);
       },
       0});
}

}  // namespace tvm_ipc
