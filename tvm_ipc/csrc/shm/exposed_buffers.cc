/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file exposed_buffers.cc
 * \brief Exposed buffers between ranks on CPUs: peers read them in the arena of their rank.
 */
#include "core/exposed_buffers.h"

#include <utility>

#include "core/check_collective_arguments.h"
#include "core/rank_runtime_state.h"
#include "shm/collectives.h"
#include "shm/endpoint_and_backend.h"
#include "shm/select_kernels_by_instruction_set.h"

namespace tvm_ipc {

namespace {

/*! \brief Copy the bytes into the rank's arena; the copy lives as long as its last reference. */
std::shared_ptr<void> Stage(const std::shared_ptr<Heap>& heap, const Buffer& tensor) {
  const size_t bytes = tensor.bytes();
  std::shared_ptr<void> copy(heap->Allocate(bytes),
                             [heap, bytes](void* data) { heap->Free(data, bytes); });
  CopyBytes(copy.get(), tensor.data, bytes, false);
  return copy;
}

}  // namespace

ExposedBuffer SharedMemoryEndpoint::Expose(const Buffer& tensor, TeamId team,
                                           std::shared_ptr<const void> keep) {
  const OpGuard guard = rank_.Begin(team);
  ExposedBuffer exposed;
  exposed.team = team;
  exposed.session = rank_.segments();
  exposed.generation = guard.barrier.generation();
  exposed.rank = rank_.id();
  exposed.memory = tensor;
  exposed.keep = std::move(keep);
  int64_t offset = rank_.OffsetOf(tensor.data, tensor.bytes());
  if (offset < 0) {
    const std::shared_ptr<void> copy = Stage(heap_, tensor);
    exposed.memory.data = copy.get();
    exposed.keep = copy;
    offset = rank_.OffsetOf(copy.get(), tensor.bytes());
  }
  exposed.number = guard.barrier.exposed_buffers().Expose(
      {offset, tensor.count, tensor.type, EmulatedLink::Now()}, exposed.keep);
  return exposed;
}

PeerMemory SharedMemoryEndpoint::PeerView(ExposedBuffer& exposed, int64_t shift) {
  const OpGuard guard = rank_.Begin(exposed.team);
  TeamBarrier& barrier = guard.barrier;
  RequireOpen("peer_view", rank_, barrier, exposed);
  const int index = TeamIndexAfter(barrier, shift);
  if (index == barrier.index()) return {exposed.memory.data, exposed.keep};
  const ExposedMemory& theirs = barrier.exposed_buffers().Of(index, exposed.number);
  const uint64_t bit = uint64_t{1} << index;
  if (rank_.link().on() && (exposed.arrived & bit) == 0) {
    rank_.link().Arrive(exposed.memory.bytes(), theirs.time);
  }
  exposed.arrived |= bit;
  return {rank_.segments()->base(barrier.rank(index)) + theirs.offset, rank_.segments()};
}

void SharedMemoryEndpoint::Release(TeamId team, const std::vector<const ExposedBuffer*>& all) {
  const OpGuard guard = rank_.Begin(team);
  guard.barrier.exposed_buffers().Release(NumbersToRelease(rank_, guard.barrier, team, all));
}

void SharedMemoryEndpoint::ReduceSlices(ReduceKind kind, TeamId team,
                                        const std::vector<Buffer>& parts, const Buffer& recv) {
  const ReduceFn reduce = RequireReduce("reduce_slices", recv.type, kind);
  const void* sources[kMaxRanks];
  const int size = OrderSlices(rank_, team, parts, recv, sources);
  reduce(recv.data, sources, size, recv.count, recv.bytes() >= kStreamBytes);
}

}  // namespace tvm_ipc
