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
#include <limits>

#include "shm/collectives.h"
#include "shm/team.h"

namespace tvm_ipc {

namespace {

/*! \brief More than any tensor has; the sum of so many for each worker does not wrap. */
constexpr int64_t kMostElements = int64_t{1} << 48;
constexpr size_t kWhole = std::numeric_limits<size_t>::max();

/*! \brief Which bytes the members of a team give each other; all of them know all. */
class Division {
 public:
  Division(const Buffer& send, const Parts& parts, const Team& team)
      : parts_(parts),
        size_(team.size()),
        width_(send.type.bytes()),
        equal_(send.bytes() / team.size()) {}

  /*! \brief The bytes that one member gives to another. */
  size_t part(int from, int to) const {
    return parts_.empty() ? equal_ : static_cast<size_t>(parts_[from * size_ + to]) * width_;
  }
  /*! \brief The bytes of a piece of it, which begins at some byte of it. */
  size_t piece(int from, int to, size_t at, size_t most) const {
    const size_t bytes = part(from, to);
    return at < bytes ? std::min(bytes - at, most) : 0;
  }
  /*! \brief The bytes of the pieces that a member gives to those before another. */
  size_t before(int from, int to, size_t at = 0, size_t most = kWhole) const {
    if (parts_.empty()) return to * piece(from, 0, at, most);
    size_t bytes = 0;
    for (int j = 0; j < to; ++j) bytes += piece(from, j, at, most);
    return bytes;
  }
  /*! \brief Where in what a member receives the part of another begins. */
  size_t place(int from, int to) const {
    size_t bytes = 0;
    for (int i = 0; i < from; ++i) bytes += part(i, to);
    return bytes;
  }
  /*! \brief The most that a member sends in all. */
  size_t most_sent() const {
    size_t most = 0;
    for (int i = 0; i < size_; ++i) most = std::max(most, before(i, size_));
    return most;
  }
  /*! \brief The elements of all parts. */
  uint64_t elements() const {
    uint64_t sum = 0;
    for (int64_t part : parts_) sum += part;
    return sum;
  }
  /*! \brief The largest part that one member gives to another. */
  size_t longest() const {
    size_t longest = 0;
    for (int i = 0; i < size_; ++i) {
      for (int j = 0; j < size_; ++j) {
        if (i != j) longest = std::max(longest, part(i, j));
      }
    }
    return longest;
  }

 private:
  const Parts& parts_;
  int size_;
  size_t width_;
  size_t equal_;
};

/*! \brief Throws if tensors and parts do not fit each other. */
void Check(const Buffer& send, const Parts& parts, const Team& team, const Buffer& recv) {
  const size_t n = team.size();
  const size_t me = team.index();
  if (send.type != recv.type || (parts.empty() && send.count != recv.count)) {
    Fail(kind::kValue, "all_to_all: send has ", send.count, " x ", Name(send.type), ", recv has ",
         recv.count, " x ", Name(recv.type), "; they must be equal");
  }
  if (parts.empty() && send.count % n != 0) {
    Fail(kind::kValue, "all_to_all: ", send.count, " elements cannot be divided evenly among ", n,
         " workers");
  }
  if (send.Overlaps(recv)) {
    Fail(kind::kValue,
         "all_to_all: send and recv overlap, but peers read the one while the other"
         " is written; they must be apart");
  }
  if (parts.empty()) return;
  if (parts.size() != n * n) {
    Fail(kind::kValue, "all_to_all: there are ", parts.size(), " parts; ", n, " workers have ",
         n * n, ", one for each to each, or none where all are equal");
  }
  size_t given = 0;
  size_t taken = 0;
  for (size_t i = 0; i < n * n; ++i) {
    if (parts[i] < 0 || parts[i] > kMostElements) {
      Fail(kind::kValue, "all_to_all: the part of worker ", i / n, " for worker ", i % n, " has ",
           parts[i], " elements");
    }
    if (i / n == me) given += parts[i];
    if (i % n == me) taken += parts[i];
  }
  if (send.count != given || recv.count != taken) {
    Fail(kind::kValue, "all_to_all: send has ", send.count, " elements and recv ", recv.count,
         "; by the parts worker ", me, " gives ", given, " and takes ", taken);
  }
}

}  // namespace

void AllToAll(Rank& rank, const Buffer& send, const Parts& parts, TeamId team_id, uint8_t flags,
              const Buffer& recv) {
  Team team(rank, team_id);
  Check(send, parts, team, recv);
  const int n = team.size();
  const int me = team.index();
  const Division division(send, parts, team);
  const bool stream = recv.bytes() >= kStreamBytes;
  Descriptor mine;
  mine.op = "all_to_all";
  mine.flags = flags;
  mine.type = send.type;
  mine.count = parts.empty() ? send.count : division.elements();
  mine.parts = HashOf(parts);
  mine.offset = rank.OffsetOf(send.data, send.bytes());
  auto take = [&](int peer, const uint8_t* from, size_t at, size_t bytes) {
    CopyBytes(recv.begin() + division.place(peer, me) + at, from, bytes, stream);
  };
  auto take_own = [&] {
    take(me, send.begin() + division.before(me, me), 0, division.part(me, me));
  };
  if (n > 1 && division.most_sent() > kEagerBytes) {
    team.Enter(mine);
    if (team.InArenas()) {
      take_own();
      for (int k = 1; k < n; ++k) {  // each begins with another peer, for they read at once
        const int peer = (me + k) % n;
        const uint8_t* memory = team.memory(peer, team.shown(peer).offset);
        take(peer, memory + division.before(peer, me), 0, division.part(peer, me));
      }
      if (!(flags & kNoExitBarrier)) team.Enter(mine);
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
