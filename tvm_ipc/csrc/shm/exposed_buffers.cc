/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file exposed_buffers.cc
 * \brief Exposed buffers between ranks on CPUs: peers read them in the arena of their rank.
 */
#include "core/exposed_buffers.h"

#include <utility>

#include "shm/collectives.h"

namespace tvm_ipc {

namespace {

/*! \brief Copy the bytes into the rank's arena; the copy lives as long as its last reference. */
std::shared_ptr<void> Stage(Rank& rank, const Buffer& tensor) {
  const std::shared_ptr<Heap>& heap = rank.endpoint().heap();
  const size_t bytes = tensor.bytes();
  std::shared_ptr<void> copy(heap->Allocate(bytes),
                             [heap, bytes](void* data) { heap->Free(data, bytes); });
  CopyBytes(copy.get(), tensor.data, bytes, false);
  return copy;
}

}  // namespace

ExposedBuffer Expose(Rank& rank, const Buffer& tensor, TeamId team,
                     std::shared_ptr<const void> keep) {
  const OpGuard guard = rank.Begin(team);
  ExposedBuffer exposed;
  exposed.team = team;
  exposed.session = rank.segments();
  exposed.generation = guard.barrier.generation();
  exposed.rank = rank.id();
  exposed.memory = tensor;
  exposed.keep = std::move(keep);
  int64_t offset = rank.OffsetOf(tensor.data, tensor.bytes());
  if (offset < 0) {
    const std::shared_ptr<void> copy = Stage(rank, tensor);
    exposed.memory.data = copy.get();
    exposed.keep = copy;
    offset = rank.OffsetOf(copy.get(), tensor.bytes());
  }
  exposed.number = guard.barrier.exposed_buffers().Expose(
      {offset, tensor.count, tensor.type, EmulatedLink::Now()}, exposed.keep);
  return exposed;
}

PeerMemory PeerView(Rank& rank, ExposedBuffer& exposed, int64_t shift) {
  const OpGuard guard = rank.Begin(exposed.team);
  TeamBarrier& barrier = guard.barrier;
  RequireOpen("peer_view", rank, barrier, exposed);
  const int index = TeamIndexAfter(barrier, shift);
  if (index == barrier.index()) return {exposed.memory.data, exposed.keep};
  const ExposedMemory& theirs = barrier.exposed_buffers().Of(index, exposed.number);
  const uint64_t bit = uint64_t{1} << index;
  if (rank.link().on() && (exposed.arrived & bit) == 0) {
    rank.link().Arrive(exposed.memory.bytes(), theirs.time);
  }
  exposed.arrived |= bit;
  return {rank.segments()->base(barrier.rank(index)) + theirs.offset, rank.segments()};
}

void Release(Rank& rank, TeamId team, const std::vector<const ExposedBuffer*>& all) {
  const OpGuard guard = rank.Begin(team);
  guard.barrier.exposed_buffers().Release(NumbersToRelease(rank, guard.barrier, team, all));
}

void ReduceSlices(Rank& rank, ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                  const Buffer& recv) {
  const ReduceFn reduce = RequireReduce("reduce_slices", recv.type, kind);
  const int me = rank.TeamIndex(team, "reduce_slices");
  const int size = rank.SizeOf(team);
  if (parts.size() != static_cast<size_t>(size)) {
    Fail(kind::kValue, "reduce_slices: ", parts.size(), " parts for a team of ", size,
         "; there is one of each member");
  }
  const void* sources[kMaxRanks];
  for (int before = 0; before < size; ++before) {
    const Buffer& part = parts[before];
    if (part.type != recv.type || part.count != recv.count) {
      Fail(kind::kValue, "reduce_slices: part ", before, " has ", part.count, " x ",
           Name(part.type), ", recv has ", recv.count, " x ", Name(recv.type),
           "; they must be equal");
    }
    if (part.Overlaps(recv)) {
      Fail(kind::kValue, "reduce_slices: part ", before,
           " and recv overlap, but peers may read the one while the other is written");
    }
    sources[(me - before + size) % size] = part.data;
  }
  reduce(recv.data, sources, size, recv.count, recv.bytes() >= kStreamBytes);
}

}  // namespace tvm_ipc
