/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_reduction_entry_points.cc
 * \brief The reductions: which members want the results, and the sinks that store them.
 */
#include <algorithm>

#include "mpi/internode_collectives.h"
#include "mpi/pipelined_internode_reduce.h"
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

/*! \brief Reduce, and store the wanted elements of the result from `first` on in recv. */
void ReduceTo(const Buffer& recv, size_t first, const Context& context, const Call& call,
              ResultRecipients wanted) {
  RequireReduce(Name(call.collective), call.send.type, call.kind);
  InternodeTeam internode_team(context.rank, context.layout);
  Section section(recv, first);
  ReduceInternode(context.ring, internode_team, call.send, context.Describe(call), wanted, section);
}

}  // namespace

void AllReduce(const Context& context, const Call& call) {
  ReduceTo(call.recv, 0, context, call, {ResultRecipients::kByAll});
}

void AllReduceRmsNorm(const Context& context, const Call& call) {
  AllReduceNormBy(call, [&](ReduceFn, Sink& sink) {
    InternodeTeam internode_team(context.rank, context.layout);
    ReduceInternode(context.ring, internode_team, call.send, context.Describe(call),
                    {ResultRecipients::kByAll}, sink);
  });
}

void AllReduceLayerNorm(const Context& context, const Call& call) {
  AllReduceRmsNorm(context, call);
}

void ReduceScatter(const Context& context, const Call& call) {
  ReduceTo(call.recv, static_cast<size_t>(context.layout.me) * call.recv.count, context, call,
           {ResultRecipients::kInParts});
}

void Reduce(const Context& context, const Call& call) {
  const Buffer none{nullptr, 0, call.send.type};
  ReduceTo(context.layout.me == call.root ? call.recv : none, 0, context, call,
           {ResultRecipients::kByOne, call.root});
}

}  // namespace tvm_ipc::internode
