/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file shows.cc
 * \brief Shows between CPUs: peers read what is shown in the arena of its rank.
 */
#include "core/shows.h"

#include <utility>

#include "shm/collectives.h"

namespace tvm_ipc {

namespace {

/*! \brief A copy of the bytes in the rank's arena, until nobody holds it. */
std::shared_ptr<void> Stage(Rank& rank, const Buffer& tensor) {
  const std::shared_ptr<Heap>& heap = rank.endpoint().heap();
  const size_t bytes = tensor.bytes();
  std::shared_ptr<void> copy(heap->Allocate(bytes),
                             [heap, bytes](void* data) { heap->Free(data, bytes); });
  CopyBytes(copy.get(), tensor.data, bytes, false);
  return copy;
}

}  // namespace

Shown Show(Rank& rank, const Buffer& tensor, TeamId team, std::shared_ptr<const void> keep) {
  const Turn turn = rank.Begin(team);
  Shown shown;
  shown.team = team;
  shown.session = rank.segments();
  shown.generation = turn.meeting.generation();
  shown.rank = rank.id();
  shown.memory = tensor;
  shown.keep = std::move(keep);
  int64_t offset = rank.OffsetOf(tensor.data, tensor.bytes());
  if (offset < 0) {
    const std::shared_ptr<void> copy = Stage(rank, tensor);
    shown.memory.data = copy.get();
    shown.keep = copy;
    offset = rank.OffsetOf(copy.get(), tensor.bytes());
  }
  shown.number = turn.meeting.shows().Show({offset, tensor.count, tensor.type, EmulatedLink::Now()},
                                           shown.keep);
  return shown;
}

PeerMemory Peer(Rank& rank, Shown& shown, int64_t shift) {
  const Turn turn = rank.Begin(shown.team);
  Meeting& meeting = turn.meeting;
  RequireOpen("peer", rank, meeting, shown);
  const int place = PlaceAfter(meeting, shift);
  if (place == meeting.index()) return {shown.memory.data, shown.keep};
  const ShownMemory& theirs = meeting.shows().Of(place, shown.number);
  const uint64_t bit = uint64_t{1} << place;
  if (rank.link().on() && (shown.arrived & bit) == 0) {
    rank.link().Arrive(shown.memory.bytes(), theirs.time);
  }
  shown.arrived |= bit;
  return {rank.segments()->base(meeting.rank(place)) + theirs.offset, rank.segments()};
}

void Hide(Rank& rank, TeamId team, const std::vector<const Shown*>& all) {
  const Turn turn = rank.Begin(team);
  turn.meeting.shows().Hide(NumbersToHide(rank, turn.meeting, team, all));
}

void ReduceParts(Rank& rank, ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                 const Buffer& recv) {
  const ReduceFn reduce = RequireReduce("reduce_parts", recv.type, kind);
  const int me = rank.PlaceIn(team, "reduce_parts");
  const int size = rank.SizeOf(team);
  if (parts.size() != static_cast<size_t>(size)) {
    Fail(kind::kValue, "reduce_parts: ", parts.size(), " parts for a team of ", size,
         "; there is one of each member");
  }
  const void* sources[kMaxRanks];
  for (int before = 0; before < size; ++before) {
    const Buffer& part = parts[before];
    if (part.type != recv.type || part.count != recv.count) {
      Fail(kind::kValue, "reduce_parts: part ", before, " has ", part.count, " x ", Name(part.type),
           ", recv has ", recv.count, " x ", Name(recv.type), "; they must be equal");
    }
    if (part.Overlaps(recv)) {
      Fail(kind::kValue, "reduce_parts: part ", before,
           " and recv overlap, but peers may read the one while the other is written");
    }
    sources[(me - before + size) % size] = part.data;
  }
  reduce(recv.data, sources, size, recv.count, recv.bytes() >= kStreamBytes);
}

}  // namespace tvm_ipc
