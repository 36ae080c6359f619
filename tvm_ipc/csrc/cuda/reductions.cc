/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reductions.cc
 * \brief Reductions. They reject the same arguments as the backend shm, with the same messages.
 */
#include <cstring>

#include "cuda/buffer_size_and_overlap_checks.h"
#include "cuda/cuda_endpoint.h"

namespace tvm_ipc::cuda {

namespace {

using kernels::Path;

kernels::Header HeaderOf(kernels::Operation operation, const Buffer& send, ReduceKind kind,
                         int strategy, uint8_t flags) {
  kernels::Header header = cuda::HeaderOf(operation, send.type, send.count, flags);
  header.mode |= kernels::Mode(static_cast<uint32_t>(kind), static_cast<uint32_t>(strategy + 1), 0);
  return header;
}

Kernel Of(const TypeKernels& of_type, Path path) {
  if (path == Path::kPush) return of_type.push;
  return path == Path::kPushSlices ? of_type.push_slices : of_type.pull;
}

/*! \brief Return the arguments of a reduction, with the input offset and the scratch that pulling
 *         needs. */
kernels::ReduceArgs ArgumentsOf(Operation& operation, kernels::Header header, Path path,
                                const Buffer& send, void* recv, bool scratch) {
  header.path = static_cast<uint32_t>(path);
  kernels::ReduceArgs args{operation.member.args, header, send.data, recv, nullptr, 0};
  if (path != Path::kPull) return args;
  const auto flags = static_cast<uint8_t>(kernels::FlagsOf(header.mode));
  const Operation::Input input = operation.PrepareInput(send.data, send.bytes(), flags);
  args.header.input = input.offset;
  args.leaves_early = static_cast<uint32_t>(input.stays);
  if (scratch) {
    const size_t bytes = kernels::ScratchBytes(send.count, send.type.bytes(), operation.size());
    args.scratch = operation.Scratch(bytes, &args.header.scratch);
  }
  return args;
}

int StrategyOf(Strategy strategy) {
  return static_cast<int>(strategy == Strategy::kDefault ? Strategy::kAuto : strategy);
}

}  // namespace

void CudaEndpoint::AllReduce(const Buffer& send, ReduceKind kind, TeamId team, Strategy strategy,
                             uint8_t flags, const Buffer& recv) {
  RequireEqual("allreduce", send, recv);
  const TypeKernels& of_type = kernels_->OfReduction("allreduce", send.type, kind);
  RequireEqualOrApart("allreduce", send, recv);
  Operation operation(*this, team);
  const int n = operation.size();
  if (n == 1) return operation.Copy(recv.data, send.data, send.bytes());
  const int way = StrategyOf(strategy);
  const Path path =
      kernels::ChooseAllReduce(send.count, send.type.bytes(), n, static_cast<uint32_t>(way));
  kernels::ReduceArgs args =
      ArgumentsOf(operation, HeaderOf(kernels::kAllReduce, send, kind, way, flags), path, send,
                  recv.data, true);
  operation.LaunchTogether("allreduce", Of(of_type, path),
                           kernels::LaunchReduce(path, send.bytes(), n, operation.limits()),
                           args.header, &args);
}

void CudaEndpoint::ReduceScatter(const Buffer& send, ReduceKind kind, TeamId team, uint8_t flags,
                                 const Buffer& recv) {
  const TypeKernels& of_type = kernels_->OfReduction("reduce_scatter", send.type, kind);
  Operation operation(*this, team);
  const auto n = static_cast<size_t>(operation.size());
  const auto me = static_cast<size_t>(operation.place());
  if (send.type != recv.type || send.count != recv.count * n) {
    Fail(kind::kValue, "reduce_scatter: send has ", send.count, " x ", tvm_ipc::Name(send.type),
         ", recv has ", recv.count, " x ", tvm_ipc::Name(recv.type), "; send must have ", n,
         " times as many of the same type");
  }
  if (send.Overlaps(recv) && recv.begin() != send.begin() + me * recv.bytes()) {
    Fail(kind::kValue, "reduce_scatter: send and recv overlap, but recv is not part ", me,
         " of send, which it may replace");
  }
  if (n == 1) return operation.Copy(recv.data, send.data, send.bytes());
  const Path path = kernels::ChooseReduceScatter(recv.count, send.type.bytes(), operation.size());
  kernels::ReduceArgs args =
      ArgumentsOf(operation, HeaderOf(kernels::kReduceScatter, send, kind, -1, flags), path, send,
                  recv.data, false);
  operation.LaunchTogether(
      "reduce_scatter", Of(of_type, path),
      kernels::LaunchReduce(path, send.bytes(), operation.size(), operation.limits()), args.header,
      &args);
}

void CudaEndpoint::Reduce(const Buffer& send, ReduceKind kind, int root, TeamId team, uint8_t flags,
                          const Buffer* recv) {
  const TypeKernels& of_type = kernels_->OfReduction("reduce", send.type, kind);
  Operation operation(*this, team);
  operation.RequireRoot("reduce", root);
  const bool receives = operation.place() == root;
  if (receives) {
    if (recv == nullptr) Fail(kind::kValue, "reduce: the root has nowhere to receive");
    RequireEqual("reduce", send, *recv);
    RequireEqualOrApart("reduce", send, *recv);
  }
  if (operation.size() == 1) return operation.Copy(recv->data, send.data, send.bytes());
  const Path path = kernels::ChooseReduce(send.count, send.type.bytes(), operation.size());
  kernels::Header header = HeaderOf(kernels::kReduce, send, kind, -1, flags);
  header.root = root;
  kernels::ReduceArgs args =
      ArgumentsOf(operation, header, path, send, receives ? recv->data : nullptr, true);
  operation.LaunchTogether(
      "reduce", Of(of_type, path),
      kernels::LaunchReduce(path, send.bytes(), operation.size(), operation.limits()), args.header,
      &args);
}

void CudaEndpoint::AllReduceNorm(const Buffer& send, const Buffer& residual, const Norm& norm,
                                 TeamId team, Strategy strategy, uint8_t flags,
                                 const Buffer& residual_out, const Buffer& norm_out) {
  const bool centred = norm.bias != nullptr;
  const char* const name = centred ? "allreduce_layer_norm" : "allreduce_rms_norm";
  RequireNorm(name, send, residual, norm, residual_out, norm_out);
  const TypeKernels& of_type = kernels_->OfNorm(name, send.type);
  kernels::NormArgs args{};
  args.weight_type = FloatTypeOf(name, norm.weight.type);
  args.bias_type = centred ? FloatTypeOf(name, norm.bias->type) : args.weight_type;
  args.out_type = FloatTypeOf(name, norm_out.type);
  Operation operation(*this, team);
  const int n = operation.size();
  const uint64_t row = norm.weight.count;
  const uint64_t width = send.type.bytes();
  const uint64_t rows = row == 0 ? 0 : send.count / row;
  const int way = StrategyOf(strategy);
  kernels::Header header = HeaderOf(centred ? kernels::kAllReduceLayer : kernels::kAllReduceRms,
                                    send, ReduceKind::kSum, way, flags);
  int64_t epsilon = 0;
  memcpy(&epsilon, &norm.epsilon, sizeof(epsilon));
  header.parts = HashOf({static_cast<int64_t>(row), epsilon});
  args.residual = residual.data;
  args.residual_out = residual_out.data;
  args.norm_out = norm_out.data;
  args.weight = norm.weight.data;
  args.bias = centred ? norm.bias->data : nullptr;
  args.row = row;
  args.epsilon = static_cast<float>(norm.epsilon);
  const kernels::Launch grid = kernels::LaunchNorm(rows, row * width, operation.limits());
  args.pieces = grid.pieces;
  if (n > 1 && kernels::FitsPushNorm(send.count, width, row, n)) {
    header.path = static_cast<uint32_t>(Path::kPush);
    args.reduce = {operation.member.args, header, send.data, nullptr, nullptr, 0};
    return operation.LaunchTogether(name, of_type.push_norm, grid, header, &args);
  }
  const void* sum = send.data;
  if (n > 1) {
    // Reduce into residual_out, unless it is the residual.
    const bool apart = residual_out.data != residual.data;
    void* const reduced = apart ? residual_out.data : operation.Sum(send.bytes());
    const Path path = kernels::ChooseAllReduce(send.count, width, n, static_cast<uint32_t>(way));
    kernels::ReduceArgs all = ArgumentsOf(operation, header, path, send, reduced, true);
    const TypeKernels& reduces = kernels_->OfReduction(name, send.type, ReduceKind::kSum);
    operation.LaunchTogether(name, Of(reduces, path),
                             kernels::LaunchReduce(path, send.bytes(), n, operation.limits()),
                             all.header, &all);
    sum = reduced;
  }
  args.reduce = {operation.member.args, header, sum, nullptr, nullptr, 0};
  operation.Launch(name, of_type.norm, grid, &args);
}

void CudaEndpoint::ReduceSlices(ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                                const Buffer& recv) {
  const TypeKernels& of_type = kernels_->OfReduction("reduce_slices", recv.type, kind);
  const int me = rank_.TeamIndex(team, "reduce_slices");
  const int size = rank_.SizeOf(team);
  if (parts.size() != static_cast<size_t>(size)) {
    Fail(kind::kValue, "reduce_slices: ", parts.size(), " parts for a team of ", size,
         "; there is one of each member");
  }
  kernels::PartsArgs args{};
  for (int before = 0; before < size; ++before) {
    const Buffer& part = parts[static_cast<size_t>(before)];
    if (part.type != recv.type || part.count != recv.count) {
      Fail(kind::kValue, "reduce_slices: part ", before, " has ", part.count, " x ",
           tvm_ipc::Name(part.type), ", recv has ", recv.count, " x ", tvm_ipc::Name(recv.type),
           "; they must be equal");
    }
    if (part.Overlaps(recv)) {
      Fail(kind::kValue, "reduce_slices: part ", before,
           " and recv overlap, but peers may read the one while the other is written");
    }
    args.parts[(me - before + size) % size] = part.data;
  }
  args.size = size;
  args.kind = static_cast<uint32_t>(kind);
  args.count = recv.count;
  args.recv = recv.data;
  const Here here(*device_);
  Launch("reduce_slices", of_type.parts, kernels::LaunchParts(recv.bytes(), limits_),
         ProgramStream(*device_), &args);
}

}  // namespace tvm_ipc::cuda
