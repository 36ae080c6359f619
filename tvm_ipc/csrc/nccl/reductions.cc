/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reductions.cc
 * \brief Reductions, by NCCL's own collectives.
 *
 * NCCL chooses the order of additions by the number of ranks, the size, and the links between the
 * devices. All ranks get the same bits, but the bits may differ between sizes.
 */
#include "core/error.h"
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

}  // namespace

void AllReduce(Team& team, const Call& call) {
  const Reduction reduction("allreduce", call.send.type, call.kind);
  team.Run(call, [&](Handle handle, cuda::Stream stream) {
    const auto& reduce = TheLibrary().AllReduce;
    return Called{reduce.name(), reduce(call.send.data, call.recv.data, call.send.count,
                                        reduction.type, reduction.how, handle, stream)};
  });
  if (team.size() == 1) team.Copy(call.send.begin(), call.recv.begin(), call.send.bytes());
}

void ReduceScatter(Team& team, const Call& call) {
  const Reduction reduction("reduce_scatter", call.send.type, call.kind);
  team.Run(call, [&](Handle handle, cuda::Stream stream) {
    const auto& reduce = TheLibrary().ReduceScatter;
    return Called{reduce.name(), reduce(call.send.data, call.recv.data, call.recv.count,
                                        reduction.type, reduction.how, handle, stream)};
  });
  if (team.size() == 1) team.Copy(call.send.begin(), call.recv.begin(), call.send.bytes());
}

void Reduce(Team& team, const Call& call) {
  const Reduction reduction("reduce", call.send.type, call.kind);
  void* target = team.index() == call.root ? call.recv.data : nullptr;
  team.Run(call, [&](Handle handle, cuda::Stream stream) {
    const auto& reduce = TheLibrary().Reduce;
    return Called{reduce.name(), reduce(call.send.data, target, call.send.count, reduction.type,
                                        reduction.how, call.root, handle, stream)};
  });
  if (team.size() == 1) team.Copy(call.send.begin(), call.recv.begin(), call.send.bytes());
}

void AllReduceRmsNorm(Team&, const Call& call) {
  Fail(kind::kValue, Name(call.collective),
       ": NCCL has no norms; compile with get_pipeline(..., fuse_epilogue=False), or open a session"
       " of a backend that has them");
}

void AllReduceLayerNorm(Team& team, const Call& call) { AllReduceRmsNorm(team, call); }

}  // namespace tvm_ipc::nccl
