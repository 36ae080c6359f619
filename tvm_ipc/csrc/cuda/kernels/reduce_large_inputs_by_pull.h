/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_large_inputs_by_pull.h
 * \brief Reductions of large inputs, which are read in place.
 *
 * In an all-reduce, each member:
 * - waits for the headers of all members,
 * - reduces its slice of all inputs into its scratch,
 * - synchronizes its blocks with the blocks of the same index of the other members,
 * - copies the slices of all members.
 *
 * No member reads inputs after this barrier, and scratches are overwritten only after the team's
 * next operation has begun. So there is no barrier at the end. A reduce-scatter has one, because
 * its inputs are read until the end.
 */
#ifndef TVM_IPC_CUDA_KERNELS_REDUCE_LARGE_INPUTS_BY_PULL_H_
#define TVM_IPC_CUDA_KERNELS_REDUCE_LARGE_INPUTS_BY_PULL_H_

#include "cuda/kernels/reduce_small_inputs_by_push.h"

namespace tvm_ipc {
namespace kernels {

/*! \brief Elements in memory, accessed in pieces of 16 bytes. */
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

/*! \brief Reduce piece i of all sources, if it has a NaN or is an average of integers. */
template <typename Type, typename Source>
TVM_IPC_DEVICE Pair FoldSixteenCarefully(const Source& source, int size, uint64_t i,
                                         uint32_t kind) {
  Pair result{0, 0};
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
  return result;
}

/*! \brief Reduce piece i of all sources; `source` returns the elements of source k. */
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
  const Pair result{low.Result(size, kind), high.Result(size, kind)};
  if (!low.unusual() && !high.unusual()) return result;
  return FoldSixteenCarefully<Type>(source, size, i, kind);
}

/*! \brief Reduce kPieces pieces i, i + step, ... below `end` of at most kSources sources. All loads
 *         are issued first. */
template <typename Type, int kSources, int kPieces, typename Source, typename Function>
TVM_IPC_DEVICE void FoldSixteens(const Source& source, int size, uint64_t i, uint64_t step,
                                 uint64_t end, uint32_t kind, const Function& function) {
  Pair pairs[kPieces][kSources];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
#pragma unroll
    for (int k = 0; k < kSources; ++k) {
      pairs[p][k] = Pair{0, 0};
      if (k < size && i + p * step < end) pairs[p][k] = source(k).Load(i + p * step);
    }
  }
  uint32_t unusual = 0;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if (i + p * step >= end) break;
    Fold<Type> low, high;
#pragma unroll
    for (int k = 0; k < kSources; ++k) {
      if (k >= size) break;
      low.Add(pairs[p][k].low, kind, k == 0);
      high.Add(pairs[p][k].high, kind, k == 0);
    }
    const Pair result{low.Result(size, kind), high.Result(size, kind)};
    if (low.unusual() || high.unusual()) {
      unusual |= 1u << p;
    } else {
      function(i + p * step, result);
    }
  }
#pragma unroll 1
  for (; unusual != 0; unusual >>= 1, i += step) {
    if (unusual & 1) function(i, FoldSixteenCarefully<Type>(source, size, i, kind));
  }
}

/*!
 * \brief Reduce the pieces i, i + step, ... below `end` of all sources, and call a function with
 *        each.
 *
 * Memory is fast if many loads are in flight: for two sources, a thread loads three pieces at once.
 */
template <typename Type, typename Source, typename Function>
TVM_IPC_DEVICE void FoldAll(const Source& source, int size, uint64_t i, uint64_t step, uint64_t end,
                            uint32_t kind, const Function& function) {
  if constexpr (Type::kAtOnce >= 8) {
#pragma unroll 1
    for (; i < end && size <= 2; i += 3 * step) {
      FoldSixteens<Type, 2, 3>(source, size, i, step, end, kind, function);
    }
  }
#pragma unroll 1
  for (; i < end; i += step) function(i, FoldSixteen<Type>(source, size, i, kind));
}

template <typename Type>
TVM_IPC_DEVICE void Pull(const ReduceArgs& args) {
  constexpr int kWidth = Type::kWidth;
  TeamOperation operation(args.team, args.header, Grid::kSame);
  if (!operation.Begin()) return;
  if (operation.talks()) operation.Tell<true>();
  if (!operation.Hear<true>()) return operation.End();
  const int size = operation.size();
  const int place = operation.place();
  const uint32_t kind = KindOf(args.header.mode);
  const uint64_t count = args.header.count;
  const bool scatters = args.header.operation == kReduceScatter;
  const uint64_t slice = scatters ? Quotient(count, size) : SliceOf(count, kWidth, size);
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
  FoldAll<Type>(source, size, first, step, own.size(), kind, [&](uint64_t i, Pair result) {
    if (!scatters) scratch.Store(i, result);
    if (args.recv != nullptr) own.Store(i, result);
  });
  if (scatters) {
    operation.Barrier(kForEnd, args.leaves_early == 0);
    return operation.End();
  }

  if (operation.Barrier(kForMiddle) && args.recv != nullptr) {
    const auto reduced = [&](int member) {
      const uint8_t* memory = args.team.region[member] + operation.scratch(member);
      return Sixteens<kWidth>(memory, slice);
    };
    // Copy from one member after the other. Small teams keep as many loads in flight as large ones.
    constexpr int kTogether = 8;
    int shift = 1;
    uint64_t next = first;
#pragma unroll 1
    while (next < scratch.size() && size > 1) {
      Pair pairs[kTogether];
      uint64_t at[kTogether];
      int from[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        at[k] = next;
        from[k] = operation.After(shift);
        pairs[k] = Pair{0, 0};
        if (next < scratch.size()) pairs[k] = reduced(from[k]).Load(next);
        if (++shift < size) continue;
        shift = 1;
        next += step;
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const Sixteens<kWidth> to = result_of(from[k]);
        if (at[k] < to.size()) to.Store(at[k], pairs[k]);
      }
    }
  }
  operation.End();
}

/*! \brief Reduce buffers that are mapped on this rank. */
template <typename Type>
TVM_IPC_DEVICE void Parts(const PartsArgs& args) {
  constexpr int kWidth = Type::kWidth;
  const auto source = [&](int k) { return Sixteens<kWidth>(args.parts[k], args.count); };
  const Sixteens<kWidth> recv(args.recv, args.count);
  const uint64_t first = static_cast<uint64_t>(Block()) * Threads() + Thread();
  const uint64_t step = static_cast<uint64_t>(Blocks()) * Threads();
  FoldAll<Type>(source, args.size, first, step, recv.size(), args.kind,
                [&](uint64_t i, Pair result) { recv.Store(i, result); });
}

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_REDUCE_LARGE_INPUTS_BY_PULL_H_
