/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_reduction_entry_points.cc
 * \brief The reductions: which members want the results, and the sinks that store them.
 */
#include <algorithm>

#include "mpi/internode_collectives.h"
#include "mpi/pipelined_internode_reduce.h"
#include "shm/argument_checks.h"
#include "shm/select_kernels_by_instruction_set.h"

namespace tvm_ipc::internode {

namespace {

/*! \brief Stores the elements of a result from `first` on, as many as the output holds. */
class Section final : public Sink {
 public:
  Section(const Buffer& recv, size_t first) : recv_(recv), first_(first) {}
  void Reduce(size_t, const void* const*, int, size_t) final {}  // never called
  void Copy(size_t at, const void* reduced, size_t count) final {
    const size_t begin = std::max(at, first_);
    const size_t end = std::min(at + count, first_ + recv_.count);
    if (begin >= end) return;
    const size_t width = recv_.type.bytes();
    CopyBytes(recv_.begin() + (begin - first_) * width,
              static_cast<const uint8_t*>(reduced) + (begin - at) * width, (end - begin) * width,
              false);
  }
  bool in_order() const final { return false; }

 private:
  const Buffer& recv_;
  const size_t first_;
};

Descriptor Describe(const OpName& op, const Buffer& send, ReduceKind kind, uint8_t flags) {
  Descriptor mine;
  mine.op = op;
  mine.reduces = true;
  mine.kind = kind;
  mine.flags = flags;
  mine.type = send.type;
  mine.count = send.count;
  return mine;
}

int8_t Number(Strategy strategy) {
  return static_cast<int8_t>(strategy == Strategy::kDefault ? Strategy::kAuto : strategy);
}

}  // namespace

void AllReduce(const Call& call, const Buffer& send, ReduceKind kind, Strategy strategy,
               uint8_t flags, const Buffer& recv) {
  CheckAllReduce(send, recv);
  RequireReduce("allreduce", send.type, kind);
  InternodeTeam internode_team(call.rank, call.layout);
  Descriptor mine = Describe("allreduce", send, kind, flags);
  mine.strategy = Number(strategy);
  Section all(recv, 0);
  ReduceInternode(call.ring, internode_team, send, mine, {ResultRecipients::kByAll}, all);
}

void AllReduceNorm(const Call& call, const Buffer& send, const Buffer& residual, const Norm& norm,
                   Strategy strategy, uint8_t flags, const Buffer& residual_out,
                   const Buffer& norm_out) {
  AllReduceNormBy(send, residual, norm, flags, residual_out, norm_out,
                  [&](ReduceFn, Descriptor mine, Sink& sink) {
                    InternodeTeam internode_team(call.rank, call.layout);
                    mine.strategy = Number(strategy);
                    ReduceInternode(call.ring, internode_team, send, mine,
                                    {ResultRecipients::kByAll}, sink);
                  });
}

void ReduceScatter(const Call& call, const Buffer& send, ReduceKind kind, uint8_t flags,
                   const Buffer& recv) {
  RequireReduce("reduce_scatter", send.type, kind);
  CheckReduceScatter(send, recv, {call.layout.size(), call.layout.me});
  InternodeTeam internode_team(call.rank, call.layout);
  Section part(recv, static_cast<size_t>(call.layout.me) * recv.count);
  ReduceInternode(call.ring, internode_team, send, Describe("reduce_scatter", send, kind, flags),
                  {ResultRecipients::kInParts}, part);
}

void Reduce(const Call& call, const Buffer& send, ReduceKind kind, int root, uint8_t flags,
            const Buffer* recv) {
  RequireReduce("reduce", send.type, kind);
  CheckRoot("reduce", root, call.layout.size());
  const bool receives = call.layout.me == root;
  CheckReduce(send, receives, recv);
  InternodeTeam internode_team(call.rank, call.layout);
  Descriptor mine = Describe("reduce", send, kind, flags);
  mine.root = call.layout.ranks[root];
  const Buffer none{nullptr, 0, send.type};
  Section result(receives ? *recv : none, 0);
  ReduceInternode(call.ring, internode_team, send, mine, {ResultRecipients::kByOne, root}, result);
}

}  // namespace tvm_ipc::internode
