/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file data_movement_collectives.cc
 * \brief Collectives that only move data, as streams (run_move.h).
 */
#include <algorithm>

#include "core/all_to_all_layout.h"
#include "core/ragged_rows.h"
#include "mpi/internode_collectives.h"
#include "mpi/run_move.h"

namespace tvm_ipc::internode {

namespace {

uint64_t BitOf(int place) { return uint64_t{1} << place; }

uint64_t All(const NodeLayout& layout) { return ~uint64_t{0} >> (64 - layout.size()); }

void Run(const Context& context, const Call& call, const std::vector<Stream>& streams) {
  InternodeTeam internode_team(context.rank, context.layout);
  RunMove(context.ring, internode_team, context.Describe(call), streams, call.send.begin(),
          call.recv.begin());
}

}  // namespace

void AllGather(const Context& context, const Call& call) {
  const NodeLayout& layout = context.layout;
  const size_t bytes = call.send.bytes();
  std::vector<Stream> streams;
  for (int i = 0; i < layout.size(); ++i) {
    streams.push_back({i, All(layout), bytes, 0, static_cast<size_t>(i) * bytes});
  }
  Run(context, call, streams);
}

void Broadcast(const Context& context, const Call& call) {
  Run(context, call, {{call.root, All(context.layout), call.recv.bytes(), 0, 0}});
}

void Scatter(const Context& context, const Call& call) {
  const size_t bytes = call.recv.bytes();
  std::vector<Stream> streams;
  for (int i = 0; i < context.layout.size(); ++i) {
    streams.push_back({call.root, BitOf(i), bytes, static_cast<size_t>(i) * bytes, 0});
  }
  Run(context, call, streams);
}

void Gather(const Context& context, const Call& call) {
  const size_t bytes = call.send.bytes();
  std::vector<Stream> streams;
  for (int i = 0; i < context.layout.size(); ++i) {
    streams.push_back({i, BitOf(call.root), bytes, 0, static_cast<size_t>(i) * bytes});
  }
  Run(context, call, streams);
}

void Permute(const Context& context, const Call& call) {
  const NodeLayout& layout = context.layout;
  const NumberView& sources = call.layout;
  std::vector<Stream> streams;
  for (int i = 0; i < layout.size(); ++i) streams.push_back({i, 0, call.send.bytes(), 0, 0});
  for (int i = 0; i < layout.size(); ++i) {
    if (sources[i] >= 0) streams[sources[i]].to |= BitOf(i);
  }
  Run(context, call, streams);
  if (sources[layout.me] < 0) std::fill_n(call.recv.begin(), call.recv.bytes(), uint8_t{0});
}

namespace {

/*! \brief Run an all-to-all with these split sizes. */
void RunSplits(const Context& context, const Call& call, const NumberView& sizes) {
  const NodeLayout& layout = context.layout;
  const int n = layout.size();
  const Division division(call.send, sizes, n);
  std::vector<Stream> streams;
  for (int i = 0; i < n; ++i) {
    const size_t into = division.recv_offset(i, layout.me);
    size_t from = 0;
    for (int j = 0; j < n; ++j) {
      streams.push_back({i, BitOf(j), division.part(i, j), from, into});
      from += division.part(i, j);
    }
  }
  Run(context, call, streams);
}

}  // namespace

void AllToAll(const Context& context, const Call& call) { RunSplits(context, call, call.layout); }

void RaggedAllToAll(const Context& context, const Call& call) {
  const NodeLayout& layout = context.layout;
  const int n = layout.size();
  const size_t numbers = call.counts.count;
  const size_t bytes = call.counts.bytes();
  CheckSentRows(call, static_cast<const int64_t*>(call.counts.data), n);
  std::vector<int64_t> all(static_cast<size_t>(n) * numbers);
  std::vector<Stream> streams;
  for (int i = 0; i < n; ++i) {
    streams.push_back({i, All(layout), bytes, 0, static_cast<size_t>(i) * bytes});
  }
  {
    InternodeTeam internode_team(context.rank, layout);
    RunMove(context.ring, internode_team, context.Describe(call), streams, call.counts.begin(),
            reinterpret_cast<uint8_t*>(all.data()));
  }
  const std::vector<int64_t> received = ReceivedCounts(call, all, n, layout.me);
  CheckReceivedRows(call, received.data(), layout.me);
  std::copy(received.begin(), received.end(), static_cast<int64_t*>(call.recv_counts.data));
  RunSplits(context, call, SplitSizes(call, all, n));
}

}  // namespace tvm_ipc::internode
