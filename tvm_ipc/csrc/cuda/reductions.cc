/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reductions.cc
 * \brief Reductions.
 */
#include "core/check_collective_arguments.h"
#include "cuda/cuda_endpoint.h"

namespace tvm_ipc::cuda {

namespace {

using kernels::Path;

Kernel Of(const TypeKernels& of_type, Path path) {
  if (path == Path::kPush) return of_type.push;
  return path == Path::kPushSlices ? of_type.push_slices : of_type.pull;
}

/*! \brief Return the arguments of a reduction, with the input offset and the scratch that pulling
 *         needs. */
kernels::ReduceArgs ArgumentsOf(Operation& operation, const Call& call, Path path, void* recv,
                                bool scratch) {
  const Buffer& send = call.send;
  kernels::ReduceArgs args{operation.member.args, HeaderOf(call), send.data, recv, nullptr, 0};
  args.header.path = static_cast<uint32_t>(path);
  if (path != Path::kPull) return args;
  const Operation::Input input = operation.PrepareInput(send.data, send.bytes(), call.flags);
  args.header.input = input.offset;
  args.leaves_early = static_cast<uint32_t>(input.stays);
  if (scratch) {
    const size_t bytes = kernels::ScratchBytes(send.count, send.type.bytes(), operation.size());
    args.scratch = operation.Scratch(bytes, &args.header.scratch);
  }
  return args;
}

/*! \brief Launch the kernel of a path on all members. */
void LaunchReduction(Operation& operation, const Call& call, const TypeKernels& of_type, Path path,
                     void* recv, bool scratch) {
  kernels::ReduceArgs args = ArgumentsOf(operation, call, path, recv, scratch);
  operation.LaunchTogether(
      Name(call.collective), Of(of_type, path),
      kernels::LaunchReduce(path, call.send.bytes(), operation.size(), operation.limits()),
      args.header, &args);
}

Path PathOf(const Call& call, int size) {
  const Strategy strategy = call.strategy == Strategy::kDefault ? Strategy::kAuto : call.strategy;
  return kernels::ChooseAllReduce(call.send.count, call.send.type.bytes(), size,
                                  static_cast<uint32_t>(strategy));
}

}  // namespace

void CudaEndpoint::AllReduce(Operation& operation, const Call& call) {
  const TypeKernels& of_type = kernels_->OfReduction("allreduce", call.send.type, call.kind);
  const int n = operation.size();
  if (n == 1) return operation.Copy(call.recv.data, call.send.data, call.send.bytes());
  LaunchReduction(operation, call, of_type, PathOf(call, n), call.recv.data, true);
}

void CudaEndpoint::ReduceScatter(Operation& operation, const Call& call) {
  const TypeKernels& of_type = kernels_->OfReduction("reduce_scatter", call.send.type, call.kind);
  const int n = operation.size();
  if (n == 1) return operation.Copy(call.recv.data, call.send.data, call.send.bytes());
  const Path path = kernels::ChooseReduceScatter(call.recv.count, call.send.type.bytes(), n);
  LaunchReduction(operation, call, of_type, path, call.recv.data, false);
}

void CudaEndpoint::Reduce(Operation& operation, const Call& call) {
  const TypeKernels& of_type = kernels_->OfReduction("reduce", call.send.type, call.kind);
  const int n = operation.size();
  if (n == 1) return operation.Copy(call.recv.data, call.send.data, call.send.bytes());
  const Path path = kernels::ChooseReduce(call.send.count, call.send.type.bytes(), n);
  void* const recv = operation.place() == call.root ? call.recv.data : nullptr;
  LaunchReduction(operation, call, of_type, path, recv, true);
}

void CudaEndpoint::AllReduceRmsNorm(Operation& operation, const Call& call) {
  const char* const name = Name(call.collective);
  const Buffer& send = call.send;
  const Buffer& residual_out = call.recv;
  const TypeKernels& of_type = kernels_->OfNorm(name, send.type);
  kernels::NormArgs args{};
  args.weight_type = FloatTypeOf(name, call.weight.type);
  args.bias_type = call.bias.exists() ? FloatTypeOf(name, call.bias.type) : args.weight_type;
  args.out_type = FloatTypeOf(name, call.norm_out.type);
  const int n = operation.size();
  const uint64_t row = call.weight.count;
  const uint64_t width = send.type.bytes();
  const uint64_t rows = row == 0 ? 0 : send.count / row;
  kernels::Header header = HeaderOf(call);
  args.residual = call.residual.data;
  args.residual_out = residual_out.data;
  args.norm_out = call.norm_out.data;
  args.weight = call.weight.data;
  args.bias = call.bias.data;
  args.row = row;
  args.epsilon = static_cast<float>(call.epsilon);
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
    const bool apart = residual_out.data != call.residual.data;
    void* const reduced = apart ? residual_out.data : operation.Sum(send.bytes());
    const TypeKernels& reduces = kernels_->OfReduction(name, send.type, ReduceKind::kSum);
    LaunchReduction(operation, call, reduces, PathOf(call, n), reduced, true);
    sum = reduced;
  }
  args.reduce = {operation.member.args, header, sum, nullptr, nullptr, 0};
  operation.Launch(name, of_type.norm, grid, &args);
}

void CudaEndpoint::AllReduceLayerNorm(Operation& operation, const Call& call) {
  AllReduceRmsNorm(operation, call);
}

void CudaEndpoint::ReduceSlices(ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                                const Buffer& recv) {
  const TypeKernels& of_type = kernels_->OfReduction("reduce_slices", recv.type, kind);
  kernels::PartsArgs args{};
  args.size = OrderSlices(rank_, team, parts, recv, args.parts);
  args.kind = static_cast<uint32_t>(kind);
  args.count = recv.count;
  args.recv = recv.data;
  const Here here(*device_);
  Launch("reduce_slices", of_type.parts, kernels::LaunchParts(recv.bytes(), limits_),
         ProgramStream(*device_), &args);
}

}  // namespace tvm_ipc::cuda
