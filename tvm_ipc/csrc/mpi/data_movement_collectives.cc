/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file data_movement_collectives.cc
 * \brief Collectives that only move data, as streams (run_move.h).
 */
#include <algorithm>

#include "core/collective_step_barrier.h"
#include "mpi/internode_collectives.h"
#include "mpi/run_move.h"
#include "shm/all_to_all_layout.h"
#include "shm/argument_checks.h"

namespace tvm_ipc::internode {

namespace {

Descriptor Describe(const OpName& op, ElementType type, size_t count, uint8_t flags,
                    int root = -1) {
  Descriptor descriptor;
  descriptor.op = op;
  descriptor.flags = flags;
  descriptor.type = type;
  descriptor.count = count;
  descriptor.root = root;
  return descriptor;
}

SliceOfTeam SliceIn(const NodeLayout& layout) { return {layout.size(), layout.me}; }

uint64_t BitOf(int place) { return uint64_t{1} << place; }

uint64_t All(const NodeLayout& layout) { return ~uint64_t{0} >> (64 - layout.size()); }

void Run(const Call& call, const Descriptor& mine, const std::vector<Stream>& streams,
         const uint8_t* send, uint8_t* recv) {
  InternodeTeam internode_team(call.rank, call.layout);
  RunMove(call.ring, internode_team, mine, streams, send, recv);
}

}  // namespace

void AllGather(const Call& call, const Buffer& send, uint8_t flags, const Buffer& recv) {
  const NodeLayout& layout = call.layout;
  CheckAllGather(send, recv, SliceIn(layout));
  std::vector<Stream> streams;
  for (int i = 0; i < layout.size(); ++i) {
    streams.push_back({i, All(layout), send.bytes(), 0, static_cast<size_t>(i) * send.bytes()});
  }
  Run(call, Describe("allgather", send.type, send.count, flags), streams, send.begin(),
      recv.begin());
}

void Broadcast(const Call& call, const Buffer* send, int root, uint8_t flags, const Buffer& recv) {
  const NodeLayout& layout = call.layout;
  CheckRoot("broadcast", root, layout.size());
  const bool sends = layout.me == root;
  CheckBroadcast(send, sends, recv);
  Run(call, Describe("broadcast", recv.type, recv.count, flags, layout.ranks[root]),
      {{root, All(layout), recv.bytes(), 0, 0}}, sends ? send->begin() : nullptr, recv.begin());
}

void Scatter(const Call& call, const Buffer* send, int root, uint8_t flags, const Buffer& recv) {
  const NodeLayout& layout = call.layout;
  CheckRoot("scatter", root, layout.size());
  const bool sends = layout.me == root;
  CheckScatter(send, sends, recv, SliceIn(layout));
  std::vector<Stream> streams;
  for (int i = 0; i < layout.size(); ++i) {
    streams.push_back({root, BitOf(i), recv.bytes(), static_cast<size_t>(i) * recv.bytes(), 0});
  }
  Run(call, Describe("scatter", recv.type, recv.count, flags, layout.ranks[root]), streams,
      sends ? send->begin() : nullptr, recv.begin());
}

void Gather(const Call& call, const Buffer& send, int root, uint8_t flags, const Buffer* recv) {
  const NodeLayout& layout = call.layout;
  CheckRoot("gather", root, layout.size());
  const bool receives = layout.me == root;
  CheckGather(send, receives, recv, SliceIn(layout));
  std::vector<Stream> streams;
  for (int i = 0; i < layout.size(); ++i) {
    streams.push_back({i, BitOf(root), send.bytes(), 0, static_cast<size_t>(i) * send.bytes()});
  }
  Run(call, Describe("gather", send.type, send.count, flags, layout.ranks[root]), streams,
      send.begin(), receives ? recv->begin() : nullptr);
}

void Permute(const Call& call, const Buffer& send, const Sources& sources, uint8_t flags,
             const Buffer& recv) {
  const NodeLayout& layout = call.layout;
  CheckPermute(send, sources, recv, SliceIn(layout));
  std::vector<Stream> streams;
  for (int i = 0; i < layout.size(); ++i) streams.push_back({i, 0, send.bytes(), 0, 0});
  for (int i = 0; i < layout.size(); ++i) {
    if (sources[i] >= 0) streams[sources[i]].to |= BitOf(i);
  }
  Descriptor mine = Describe("permute", send.type, send.count, flags);
  mine.layout_hash = HashOf(sources);
  Run(call, mine, streams, send.begin(), recv.begin());
  if (sources[layout.me] < 0) std::fill_n(recv.begin(), recv.bytes(), uint8_t{0});
}

void AllToAll(const Call& call, const Buffer& send, const SplitCounts& parts, uint8_t flags,
              const Buffer& recv) {
  const NodeLayout& layout = call.layout;
  const int n = layout.size();
  CheckAllToAll(send, parts, recv, SliceIn(layout));
  const Division division(send, parts, n);
  std::vector<Stream> streams;
  for (int i = 0; i < n; ++i) {
    const size_t into = division.recv_offset(i, layout.me);
    size_t from = 0;
    for (int j = 0; j < n; ++j) {
      streams.push_back({i, BitOf(j), division.part(i, j), from, into});
      from += division.part(i, j);
    }
  }
  Descriptor mine =
      Describe("all_to_all", send.type, parts.empty() ? send.count : division.elements(), flags);
  mine.layout_hash = HashOf(parts);
  Run(call, mine, streams, send.begin(), recv.begin());
}

}  // namespace tvm_ipc::internode
