/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file pull.h
 * \brief Reductions of inputs that are read where they lie: for what is large.
 *
 * An all-reduce: all hear that all are there (the headers); each reduces its slice of all inputs
 * into its scratch; blocks of the same number meet; each copies the slices of all. Nobody reads
 * inputs after that meeting, and scratches are written again after the team's next start. So there
 * is no meeting at the end, but for a reduce-scatter, whose inputs are read up to it.
 */
#ifndef TVM_IPC_CUDA_KERNELS_PULL_H_
#define TVM_IPC_CUDA_KERNELS_PULL_H_

#include "cuda/kernels/push.h"

namespace tvm_ipc {
namespace kernels {

/*! \brief Elements in memory, in pieces of 16 bytes. */
template <int kWidth>
class Sixteens {
 public:
  TVM_IPC_DEVICE Sixteens(const void* data, uint64_t count)
      : data_(static_cast<uint8_t*>(const_cast<void*>(data))),
        bytes_(count * kWidth),
        aligned_(IsAligned(data, 16)) {}
  TVM_IPC_DEVICE uint64_t size() const { return (bytes_ + 15) / 16; }
  TVM_IPC_DEVICE Pair Load(uint64_t i) const {
    if (Whole(i)) return ReadPair(data_ + 16 * i);
    return {Half(2 * i), Half(2 * i + 1)};
  }
  TVM_IPC_DEVICE void Store(uint64_t i, Pair pair) const {
    if (Whole(i)) return WritePair(data_ + 16 * i, pair);
    StoreHalf(2 * i, pair.low);
    StoreHalf(2 * i + 1, pair.high);
  }

 private:
  TVM_IPC_DEVICE bool Whole(uint64_t i) const { return aligned_ && 16 * i + 16 <= bytes_; }
  TVM_IPC_DEVICE uint64_t Half(uint64_t i) const {
    return 8 * i < bytes_ ? LoadElements<kWidth>(data_ + 8 * i, bytes_ - 8 * i) : 0;
  }
  TVM_IPC_DEVICE void StoreHalf(uint64_t i, uint64_t eight) const {
    if (8 * i < bytes_) StoreElements<kWidth>(data_ + 8 * i, eight, bytes_ - 8 * i);
  }

  uint8_t* data_;
  uint64_t bytes_;
  bool aligned_;
};

/*! \brief Piece i of all sources; `source` gives the elements of source k. */
template <typename Type, typename Source>
TVM_IPC_DEVICE Pair FoldSixteen(const Source& source, int size, uint64_t i, uint32_t kind) {
  constexpr int kAtOnce = Type::kAtOnce;
  Fold<Type> low, high;
#pragma unroll 1
  for (int base = 0; base < size; base += kAtOnce) {
    Pair pairs[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (base + k < size) pairs[k] = source(base + k).Load(i);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (base + k >= size) break;
      low.Add(pairs[k].low, kind, base + k == 0);
      high.Add(pairs[k].high, kind, base + k == 0);
    }
  }
  Pair result{low.Result(size, kind), high.Result(size, kind)};
  if (low.unusual() || high.unusual()) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const uint64_t eight = FoldCarefully<Type>(
          [&](int k) {
            const Pair pair = source(k).Load(i);
            return half == 0 ? pair.low : pair.high;
          },
          size, kind);
      (half == 0 ? result.low : result.high) = eight;
    }
  }
  return result;
}

template <typename Type>
TVM_IPC_DEVICE void Pull(const ReduceArgs& args) {
  constexpr int kWidth = Type::kWidth;
  constexpr int kAtOnce = Type::kAtOnce;
  TeamOperation operation(args.team, args.header, Grid::kSame);
  if (!operation.Begin()) return;
  if (operation.talks()) operation.Tell<true>();
  if (!operation.Hear<true>()) return operation.End();
  const int size = operation.size();
  const int place = operation.place();
  const uint32_t kind = KindOf(args.header.mode);
  const uint64_t count = args.header.count;
  const bool scatters = args.header.operation == kReduceScatter;
  const uint64_t slice = scatters ? count / size : SliceOf(count, kWidth, size);
  const auto start_of = [&](int member) { return Least(count, member * slice); };
  const auto count_of = [&](int member) {
    return Least(count, start_of(member) + slice) - start_of(member);
  };
  const auto result_of = [&](int member) {
    return Sixteens<kWidth>(static_cast<uint8_t*>(args.recv) + start_of(member) * kWidth,
                            count_of(member));
  };
  const uint64_t first = static_cast<uint64_t>(Block()) * Threads() + Thread();
  const uint64_t step = static_cast<uint64_t>(Blocks()) * Threads();

  const auto source = [&](int member) {
    const uint8_t* input = args.team.region[member] + operation.input(member);
    return Sixteens<kWidth>(input + start_of(place) * kWidth, count_of(place));
  };
  const Sixteens<kWidth> scratch(args.scratch, slice);
  const Sixteens<kWidth> own = scatters ? Sixteens<kWidth>(args.recv, slice) : result_of(place);
#pragma unroll 1
  for (uint64_t i = first; i < own.size(); i += step) {
    const Pair result = FoldSixteen<Type>(source, size, i, kind);
    if (!scatters) scratch.Store(i, result);
    if (args.recv != nullptr) own.Store(i, result);
  }
  if (scatters) {
    operation.Meet(kForEnd, args.leaves_early == 0);
    return operation.End();
  }

  if (operation.Meet(kForMiddle) && args.recv != nullptr) {
    const auto reduced = [&](int member) {
      const uint8_t* memory = args.team.region[member] + operation.scratch(member);
      return Sixteens<kWidth>(memory, slice);
    };
#pragma unroll 1
    for (uint64_t i = first; i < scratch.size(); i += step) {
#pragma unroll 1
      for (int base = 1; base < size; base += kAtOnce) {
        Pair pairs[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (base + k < size) pairs[k] = reduced(operation.After(base + k)).Load(i);
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (base + k >= size) break;
          const Sixteens<kWidth> to = result_of(operation.After(base + k));
          if (i < to.size()) to.Store(i, pairs[k]);
        }
      }
    }
  }
  operation.End();
}

/*! \brief A reduction of memory that is mapped here. */
template <typename Type>
TVM_IPC_DEVICE void Parts(const PartsArgs& args) {
  constexpr int kWidth = Type::kWidth;
  const auto source = [&](int k) { return Sixteens<kWidth>(args.parts[k], args.count); };
  const Sixteens<kWidth> recv(args.recv, args.count);
  const uint64_t step = static_cast<uint64_t>(Blocks()) * Threads();
#pragma unroll 1
  for (uint64_t i = static_cast<uint64_t>(Block()) * Threads() + Thread(); i < recv.size();
       i += step) {
    recv.Store(i, FoldSixteen<Type>(source, args.size, i, args.kind));
  }
}

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_PULL_H_
