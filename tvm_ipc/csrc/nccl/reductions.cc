/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reductions.cc
 * \brief Reductions, by NCCL's own collectives.
 *
 * NCCL chooses the order of additions by the number of ranks, the size, and the links between the
 * devices. All ranks get the same bits, but the bits may differ between sizes.
 */
#include "nccl/collectives_endpoint.h"
#include "nccl/team_operation.h"

namespace tvm_ipc::nccl {

namespace {

/*! \brief The type and operator that NCCL uses for a reduction. */
struct Reduction {
  Type type = kFloat32;
  Operator how = kSum;

  Reduction(const char* op, ElementType element, ReduceKind kind) {
    const char* why = nullptr;
    if (FindReduction(element, kind, &type, &how, &why)) return;
    Fail(kind::kType, op, ": NCCL does not do ", Name(kind), " of ", Name(element), ": ", why);
  }
};

Descriptor About(const OpName& op, ReduceKind kind, const Buffer& send, uint8_t flags,
                 int root = -1) {
  Descriptor descriptor;
  descriptor.op = op;
  descriptor.reduces = true;
  descriptor.kind = kind;
  descriptor.flags = flags;
  descriptor.type = send.type;
  descriptor.count = send.count;
  descriptor.root = root;
  return descriptor;
}

void RequireSame(const char* op, const Buffer& send, const Buffer& recv) {
  if (send.type != recv.type || send.count != recv.count) {
    Fail(kind::kValue, op, ": send has ", send.count, " x ", Name(send.type), ", recv has ",
         recv.count, " x ", Name(recv.type), "; they must be equal");
  }
  if (send.Overlaps(recv) && send.data != recv.data) {
    Fail(kind::kValue, op, ": send and recv overlap in part; they must be equal or apart");
  }
}

}  // namespace

void NcclEndpoint::AllReduce(const Buffer& send, ReduceKind kind, TeamId team_id, Strategy strategy,
                             uint8_t flags, const Buffer& recv) {
  RequireSame("allreduce", send, recv);
  const Reduction reduction("allreduce", send.type, kind);
  Team team(communicators_, team_id);
  Descriptor mine = About("allreduce", kind, send, flags);
  mine.strategy = static_cast<int8_t>(strategy);  // only compared: NCCL chooses its own algorithm
  team.Run(mine, send.bytes(), [&](Handle handle, cuda::Stream stream) {
    const auto& reduce = TheLibrary().AllReduce;
    return Called{reduce.name(), reduce(send.data, recv.data, send.count, reduction.type,
                                        reduction.how, handle, stream)};
  });
  if (team.size() == 1) team.Copy(send.begin(), recv.begin(), send.bytes());
}

void NcclEndpoint::ReduceScatter(const Buffer& send, ReduceKind kind, TeamId team_id, uint8_t flags,
                                 const Buffer& recv) {
  const Reduction reduction("reduce_scatter", send.type, kind);
  Team team(communicators_, team_id);
  const auto n = static_cast<size_t>(team.size());
  if (send.type != recv.type || send.count != recv.count * n) {
    Fail(kind::kValue, "reduce_scatter: send has ", send.count, " x ", Name(send.type),
         ", recv has ", recv.count, " x ", Name(recv.type), "; send must have ", n,
         " times as many of the same type");
  }
  const uint8_t* own = send.begin() + static_cast<size_t>(team.index()) * recv.bytes();
  if (send.Overlaps(recv) && recv.begin() != own) {
    Fail(kind::kValue, "reduce_scatter: send and recv overlap, but recv is not part ", team.index(),
         " of send, which it may replace");
  }
  team.Run(About("reduce_scatter", kind, send, flags), send.bytes(),
           [&](Handle handle, cuda::Stream stream) {
             const auto& reduce = TheLibrary().ReduceScatter;
             return Called{reduce.name(), reduce(send.data, recv.data, recv.count, reduction.type,
                                                 reduction.how, handle, stream)};
           });
  if (team.size() == 1) team.Copy(send.begin(), recv.begin(), send.bytes());
}

void NcclEndpoint::Reduce(const Buffer& send, ReduceKind kind, int root, TeamId team_id,
                          uint8_t flags, const Buffer* recv) {
  const Reduction reduction("reduce", send.type, kind);
  Team team(communicators_, team_id);
  team.RequireRoot("reduce", root);
  const bool receives = team.index() == root;
  if (receives) {
    if (recv == nullptr) Fail(kind::kValue, "reduce: the root has nowhere to receive");
    RequireSame("reduce", send, *recv);
  }
  void* target = receives ? recv->data : nullptr;
  team.Run(About("reduce", kind, send, flags, team.rank(root)), send.bytes(),
           [&](Handle handle, cuda::Stream stream) {
             const auto& reduce = TheLibrary().Reduce;
             return Called{reduce.name(), reduce(send.data, target, send.count, reduction.type,
                                                 reduction.how, root, handle, stream)};
           });
  if (team.size() == 1) team.Copy(send.begin(), recv->begin(), send.bytes());
}

void NcclEndpoint::AllReduceNorm(const Buffer&, const Buffer&, const Norm&, TeamId, Strategy,
                                 uint8_t, const Buffer&, const Buffer&) {
  Fail(kind::kValue,
       "allreduce_norm: NCCL has no norms; compile with get_pipeline(..., fuse_epilogue=False), or"
       " open a session of a backend that has them");
}

}  // namespace tvm_ipc::nccl
