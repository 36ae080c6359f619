/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_small_inputs_by_push.h
 * \brief Reductions of small inputs, which members push into each other's team slots.
 *
 * Every 8 bytes are sent as a pair of words, each of 4 bytes and the epoch. So there is no flag
 * that announces data, nothing is cleared, and a member waits only for the data itself. Two staging
 * buffers, used in turn by epoch, are enough (kernel_arguments_and_peer_memory.h). Inputs may be in
 * any memory: only the rank's own kernel reads them.
 */
#ifndef TVM_IPC_CUDA_KERNELS_REDUCE_SMALL_INPUTS_BY_PUSH_H_
#define TVM_IPC_CUDA_KERNELS_REDUCE_SMALL_INPUTS_BY_PUSH_H_

#include "cuda/kernels/reduce_8_bytes_device_code.h"
#include "cuda/kernels/team_operation_device_code.h"

namespace tvm_ipc {
namespace kernels {

TVM_IPC_DEVICE uint64_t Least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/*! \brief Elements in memory, accessed in pieces of 8 bytes. */
template <int kWidth>
class Eights {
 public:
  TVM_IPC_DEVICE Eights(const void* data, uint64_t count)
      : data_(static_cast<uint8_t*>(const_cast<void*>(data))),
        bytes_(count * kWidth),
        aligned_(IsAligned(data, 8)) {}
  TVM_IPC_DEVICE uint64_t size() const { return (bytes_ + 7) / 8; }
  TVM_IPC_DEVICE uint64_t Load(uint64_t i) const {
    if (Whole(i)) return *reinterpret_cast<const uint64_t*>(data_ + 8 * i);
    return LoadElements<kWidth>(data_ + 8 * i, bytes_ - 8 * i);
  }
  TVM_IPC_DEVICE void Store(uint64_t i, uint64_t eight) const {
    if (Whole(i)) {
      *reinterpret_cast<uint64_t*>(data_ + 8 * i) = eight;
    } else {
      StoreElements<kWidth>(data_ + 8 * i, eight, bytes_ - 8 * i);
    }
  }

 private:
  TVM_IPC_DEVICE bool Whole(uint64_t i) const { return aligned_ && 8 * i + 8 <= bytes_; }

  uint8_t* data_;
  uint64_t bytes_;
  bool aligned_;
};

/*! \brief An area of the members' staging buffers: from pair `start` on, with `stride` pairs for
 *         each member. */
struct Stage {
  uint64_t start;
  uint64_t stride;

  TVM_IPC_DEVICE void Push(const TeamOperation& operation, int member, uint64_t i,
                           uint64_t eight) const {
    const Pair pair{Tagged(static_cast<uint32_t>(eight), operation.epoch()),
                    Tagged(static_cast<uint32_t>(eight >> 32), operation.epoch())};
    StorePair(At(operation.stage(member), operation.place(), i), pair);
  }
  /*! \brief Load the pair that a member pushes to this one; its tags show whether it is there. */
  TVM_IPC_DEVICE Pair Look(const TeamOperation& operation, int member, uint64_t i) const {
    return LoadPair(At(operation.stage(), member, i));
  }

 private:
  TVM_IPC_DEVICE uint8_t* At(uint8_t* stage, int from, uint64_t i) const {
    return stage + (start + from * stride + i) * sizeof(Pair);
  }
};

TVM_IPC_DEVICE Stage WholeStage(int size) { return {0, PushBytes(size) / 8}; }
TVM_IPC_DEVICE Stage SlicesStage(int size) { return {0, SliceBytes(size) / 8}; }
TVM_IPC_DEVICE Stage ResultsStage(int size) {
  return {size * SliceBytes(size) / 8, SliceBytes(size) / 8};
}

TVM_IPC_DEVICE uint64_t Eight(Pair pair) {
  return static_cast<uint64_t>(Data(pair.high)) << 32 | Data(pair.low);
}

/*!
 * \brief Wait for piece i of the members from `base` to base + kAtOnce - 1 that are below `end`,
 *        and call a function with each. The member `except` is not waited for.
 */
template <int kAtOnce, typename Function>
TVM_IPC_DEVICE void TakeSome(TeamOperation& operation, const Stage& stage, Phase phase, uint64_t i,
                             int base, int end, int except, const Function& function) {
  Pair pairs[kAtOnce];
  int missing;
  do {
    missing = -1;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int member = base + k;
      if (member < end && member != except) pairs[k] = stage.Look(operation, member, i);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int member = base + k;
      if (member < end && member != except && !Has(pairs[k], operation.epoch())) missing = member;
    }
  } while (missing >= 0 && !operation.GivesUp(phase, missing));
  if (operation.failed()) return;
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int member = base + k;
    if (member < end) function(member, Eight(pairs[k]));
  }
}

/*!
 * \brief Return the reduction of piece i of all members. If the operation has failed, the result is
 *        meaningless.
 * \param extra One more source, the last one, if kExtra is set.
 */
template <typename Type, bool kExtra = false>
TVM_IPC_DEVICE uint64_t FoldPushed(TeamOperation& operation, const Stage& stage, uint64_t i,
                                   uint64_t own, uint32_t kind, uint64_t extra = 0) {
  const int size = operation.size();
  const int place = operation.place();
  constexpr int kAtOnce = Type::kAtOnce;
  Fold<Type> fold;
#pragma unroll 1
  for (int base = 0; base < size && !operation.failed(); base += kAtOnce) {
    TakeSome<kAtOnce>(operation, stage, kForData, i, base, size, place,
                      [&](int member, uint64_t eight) {
                        fold.Add(member == place ? own : eight, kind, member == 0);
                      });
  }
  if (operation.failed()) return 0;
  if (kExtra) fold.Add(extra, kind, false);
  const uint64_t result = fold.Result(size + kExtra, kind);
  if (!fold.unusual()) return result;
  return FoldCarefully<Type>(
      [&](int member) {
        if (kExtra && member == size) return extra;
        return member == place ? own : Eight(stage.Look(operation, member, i));
      },
      size + kExtra, kind);
}

/*! \brief Push all inputs to all members, or to the root only, and reduce them there. */
template <typename Type>
TVM_IPC_DEVICE void Push(const ReduceArgs& args) {
  TeamOperation operation(args.team, args.header, Grid::kAny);
  if (!operation.Begin()) return;
  const int size = operation.size();
  const int root = args.header.root;
  const uint32_t kind = KindOf(args.header.mode);
  const Stage stage = WholeStage(size);
  const Eights<Type::kWidth> send(args.send, args.header.count);
  const Eights<Type::kWidth> recv(args.recv, args.header.count);
  if (operation.talks()) operation.Tell<false>();
  if (operation.computes()) {
#pragma unroll 1
    for (uint64_t i = operation.worker(); i < send.size(); i += operation.workers()) {
      const uint64_t eight = send.Load(i);
#pragma unroll 1
      for (int shift = 1; shift < size; ++shift) {
        const int member = operation.After(shift);
        if (root < 0 || member == root) stage.Push(operation, member, i, eight);
      }
    }
  }
  if (operation.talks()) operation.Hear<false>();
  if (operation.computes() && args.recv != nullptr) {
#pragma unroll 1
    for (uint64_t i = operation.worker(); i < send.size() && !operation.failed();
         i += operation.workers()) {
      const uint64_t result = FoldPushed<Type>(operation, stage, i, send.Load(i), kind);
      if (!operation.failed()) recv.Store(i, result);
    }
  }
  operation.End();
}

/*! \brief Push slices: each member reduces its slice of all inputs. In an all-reduce, it then
 *         pushes the result to all members. */
template <typename Type>
TVM_IPC_DEVICE void PushSlices(const ReduceArgs& args) {
  TeamOperation operation(args.team, args.header, Grid::kAny);
  if (!operation.Begin()) return;
  const int size = operation.size();
  const int place = operation.place();
  const uint32_t kind = KindOf(args.header.mode);
  const uint64_t count = args.header.count;
  const bool scatters = args.header.operation == kReduceScatter;
  const uint64_t slice = scatters ? Quotient(count, size) : SliceOf(count, Type::kWidth, size);
  const auto slice_of = [&](const void* all, int member) {
    const uint64_t start = Least(count, member * slice);
    return Eights<Type::kWidth>(static_cast<const uint8_t*>(all) + start * Type::kWidth,
                                Least(count, start + slice) - start);
  };
  const Stage inputs = SlicesStage(size);
  const Stage results = ResultsStage(size);
  // A thread handles the same pieces of all slices, so it has read every piece that it overwrites.
  const uint64_t most = DivideUp(slice * Type::kWidth, 8);
  if (operation.talks()) operation.Tell<false>();
  if (operation.computes()) {
#pragma unroll 1
    for (uint64_t i = operation.worker(); i < most; i += operation.workers()) {
#pragma unroll 1
      for (int shift = 1; shift < size; ++shift) {
        const int member = operation.After(shift);
        const auto part = slice_of(args.send, member);
        if (i < part.size()) inputs.Push(operation, member, i, part.Load(i));
      }
    }
  }
  if (operation.talks()) operation.Hear<false>();
  if (operation.computes()) {
    const auto own = slice_of(args.send, place);
    const auto to = scatters ? Eights<Type::kWidth>(args.recv, slice) : slice_of(args.recv, place);
#pragma unroll 1
    for (uint64_t i = operation.worker(); i < own.size() && !operation.failed();
         i += operation.workers()) {
      const uint64_t result = FoldPushed<Type>(operation, inputs, i, own.Load(i), kind);
      if (operation.failed()) break;
      to.Store(i, result);
#pragma unroll 1
      for (int shift = 1; shift < size && !scatters; ++shift) {
        results.Push(operation, operation.After(shift), i, result);
      }
    }
#pragma unroll 1
    for (uint64_t i = operation.worker(); i < most && !scatters && !operation.failed();
         i += operation.workers()) {
      constexpr int kAtOnce = Type::kAtOnce;
      // No slice is longer than the one before it, so the first members have a piece i.
      int with = 0;
      while (with < size && i < slice_of(args.send, with).size()) ++with;
#pragma unroll 1
      for (int base = 0; base < with && !operation.failed(); base += kAtOnce) {
        TakeSome<kAtOnce>(operation, results, kForResult, i, base, with, place,
                          [&](int member, uint64_t eight) {
                            if (member != place) slice_of(args.recv, member).Store(i, eight);
                          });
      }
    }
  }
  operation.End();
}

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_REDUCE_SMALL_INPUTS_BY_PUSH_H_
