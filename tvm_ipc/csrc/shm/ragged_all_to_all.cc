/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file ragged_all_to_all.cc
 * \brief All-to-all of rows whose numbers only their senders know.
 *
 * In the first step each member exposes its counts in its staging buffer, so afterwards all members
 * know the counts of all. A member with few rows for others exposes these rows there too. Inputs in
 * arenas are read in place after this step. Other inputs go through the staging buffers, in pieces
 * that contain a part of the rows for each member.
 */
#include <algorithm>
#include <vector>

#include "core/all_to_all_layout.h"
#include "core/ragged_rows.h"
#include "shm/collectives.h"

namespace tvm_ipc {

namespace {

/*! \brief Where the other members find the rows of a sender. */
enum class Source { kFirstStep, kInPlace, kPieces };

/*! \brief Return the offset of the rows for `to` among those for all other members. */
size_t OffsetAmongOthers(const Division& division, int from, int to) {
  return division.before(from, to) - (from < to ? division.part(from, from) : 0);
}

/*! \brief Return the number of bytes that a member sends to others. */
size_t BytesForOthers(const Division& division, int from, int size) {
  return division.before(from, size) - division.part(from, from);
}

}  // namespace

void RaggedAllToAll(Team& team, const Call& call) {
  const Buffer& send = call.send;
  const Buffer& recv = call.recv;
  const int n = team.size();
  const int me = team.index();
  const size_t numbers = call.counts.count;
  const auto* const counts = static_cast<const int64_t*>(call.counts.data);
  const size_t head = (call.counts.bytes() + kLine - 1) / kLine * kLine;
  CheckSentRows(call, counts, n);

  // Until the first step, this member knows only the counts of its own rows.
  const Descriptor mine = team.Describe(call);
  std::vector<int64_t> all(static_cast<size_t>(n) * numbers);
  std::copy_n(counts, numbers, &all[static_cast<size_t>(me) * numbers]);
  std::vector<int64_t> sizes = SplitSizes(call, all, n);
  const Division own(send, sizes, n);
  uint8_t* const stage = team.NextBuffer();
  CopyBytes(stage, reinterpret_cast<const uint8_t*>(counts), call.counts.bytes(), false);
  if (BytesForOthers(own, me, n) <= kEagerBytes) {
    for (int i = 0; i < n; ++i) {
      if (i == me) continue;
      CopyBytes(stage + head + OffsetAmongOthers(own, me, i), send.begin() + own.before(me, i),
                own.part(me, i), false);
    }
  }
  team.Enter(mine);

  for (int i = 0; i < n; ++i) {
    if (i == me) continue;
    CopyBytes(reinterpret_cast<uint8_t*>(&all[static_cast<size_t>(i) * numbers]), team.buffer(i),
              call.counts.bytes(), false);
  }
  const std::vector<int64_t> received = ReceivedCounts(call, all, n, me);
  CheckReceivedRows(call, received.data(), me);
  std::copy(received.begin(), received.end(), static_cast<int64_t*>(call.recv_counts.data));
  sizes = SplitSizes(call, all, n);
  const Division division(send, sizes, n);
  // All members choose the same, because they know the same counts and offsets.
  std::vector<Source> sources;
  size_t longest = 0;
  bool in_place = false;
  for (int i = 0; i < n; ++i) {
    const bool first_step = BytesForOthers(division, i, n) <= kEagerBytes;
    sources.push_back(first_step                    ? Source::kFirstStep
                      : team.exposed(i).offset >= 0 ? Source::kInPlace
                                                    : Source::kPieces);
    in_place = in_place || sources.back() == Source::kInPlace;
    for (int j = 0; j < n && sources.back() == Source::kPieces; ++j) {
      if (i != j) longest = std::max(longest, division.part(i, j));
    }
  }

  const bool stream = recv.bytes() >= kStreamBytes;
  auto take = [&](int peer, const uint8_t* from, size_t at, size_t bytes) {
    CopyBytes(recv.begin() + division.recv_offset(peer, me) + at, from, bytes, stream);
  };
  take(me, send.begin() + division.before(me, me), 0, division.part(me, me));
  for (int k = 1; k < n; ++k) {  // each begins with a different peer, since all read at once
    const int peer = (me + k) % n;
    const size_t bytes = division.part(peer, me);
    if (sources[peer] == Source::kFirstStep) {
      take(peer, team.buffer(peer) + head + OffsetAmongOthers(division, peer, me), 0, bytes);
    } else if (sources[peer] == Source::kInPlace) {
      const uint8_t* memory = team.memory(peer, team.exposed(peer).offset);
      take(peer, memory + division.before(peer, me), 0, bytes);
    }
  }
  const size_t most = kStageBytes / static_cast<size_t>(n) / kLine * kLine;
  for (size_t at = 0; at < longest; at += most) {
    for (int i = 0; i < n && sources[me] == Source::kPieces; ++i) {
      if (i == me) continue;
      CopyBytes(team.NextBuffer() + division.before(me, i, at, most),
                send.begin() + division.before(me, i) + at, division.piece(me, i, at, most), false);
    }
    team.Enter(mine);
    for (int k = 1; k < n; ++k) {
      const int peer = (me + k) % n;
      if (sources[peer] != Source::kPieces) continue;
      take(peer, team.buffer(peer) + division.before(peer, me, at, most), at,
           division.piece(peer, me, at, most));
    }
  }
  // A step of pieces comes after all reads in place.
  if (in_place && longest == 0 && !(call.flags & kNoExitBarrier)) team.Enter(mine);
}

}  // namespace tvm_ipc
