/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file allreduce_norm_device_code.h
 * \brief All-reduce, addition of a residual, and norm of the rows, in one kernel.
 *
 * The results have the same bits as on the CPU, except for the payload of a NaN in float32. The sum
 * is rounded, the residual is added, that is rounded too, and the norm is computed from the rounded
 * values. A sum along a row adds element i to lane i % 32 of 32 lanes, then adds the lanes in a
 * tree. A variance is computed from the differences from the mean.
 */
#ifndef TVM_IPC_CUDA_KERNELS_ALLREDUCE_NORM_DEVICE_CODE_H_
#define TVM_IPC_CUDA_KERNELS_ALLREDUCE_NORM_DEVICE_CODE_H_

#include "cuda/kernels/reduce_small_inputs_by_push.h"

namespace tvm_ipc {
namespace kernels {

constexpr uint32_t kNormLanes = 32;
/*! \brief The number of elements of a row that a block keeps in shared memory. It reads longer rows
 *         again, tile by tile. */
constexpr uint64_t kTile = 8192;

struct NormState {
  alignas(16) float tile[kTile];
  float lanes[kNormLanes];
  uint32_t last;
};

TVM_IPC_DEVICE float LoadFloat(const void* data, uint64_t i, uint32_t type) {
  if (type == kFloat32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return type == kFloat16 ? WidenHalf(bits) : WidenBFloat(bits);
}

/*! \brief Convert to a 16-bit type. */
TVM_IPC_DEVICE uint16_t NarrowFloat(float value, uint32_t type) {
  const bool nan = value != value;
  if (type == kBFloat16) return nan ? 0x7fc0 : NarrowBFloat(value);
  return nan ? 0x7e00 : NarrowHalf(value);
}

TVM_IPC_DEVICE void StoreFloat(void* data, uint64_t i, uint32_t type, float value) {
  if (type == kFloat32) {
    static_cast<float*>(data)[i] = value;
    return;
  }
  static_cast<uint16_t*>(data)[i] = NarrowFloat(value, type);
}

/*! \brief Load elements i to i + 3, which must be 16-byte aligned (8-byte for 16-bit types). */
TVM_IPC_DEVICE void LoadFloats(const void* data, uint64_t i, uint32_t type, float (&values)[4]) {
  if (type == kFloat32) {
    const Pair pair = ReadPair(static_cast<const float*>(data) + i);
    const uint64_t words[2] = {pair.low, pair.high};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      values[k] = BitCast<float>(static_cast<uint32_t>(words[k / 2] >> k % 2 * 32));
    }
    return;
  }
  const uint64_t eight = *reinterpret_cast<const uint64_t*>(static_cast<const uint16_t*>(data) + i);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const auto bits = static_cast<uint16_t>(eight >> k * 16);
    values[k] = type == kFloat16 ? WidenHalf(bits) : WidenBFloat(bits);
  }
}
TVM_IPC_DEVICE void LoadFloats(const void* data, uint64_t i, uint32_t type, float (&values)[1]) {
  values[0] = LoadFloat(data, i, type);
}

TVM_IPC_DEVICE void StoreFloats(void* data, uint64_t i, uint32_t type, const float (&values)[4]) {
  if (type == kFloat32) {
    uint64_t words[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      words[k / 2] |= static_cast<uint64_t>(BitCast<uint32_t>(values[k])) << k % 2 * 32;
    }
    return WritePair(static_cast<float*>(data) + i, Pair{words[0], words[1]});
  }
  uint64_t eight = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    eight |= static_cast<uint64_t>(NarrowFloat(values[k], type)) << k * 16;
  }
  *reinterpret_cast<uint64_t*>(static_cast<uint16_t*>(data) + i) = eight;
}
TVM_IPC_DEVICE void StoreFloats(void* data, uint64_t i, uint32_t type, const float (&values)[1]) {
  StoreFloat(data, i, type, values[0]);
}

/*! \brief A row of residual_out, normalised by one block. */
template <typename Type>
class Row {
 public:
  /*! \param kept Whether the block's threads have stored the whole row in the tile (see Keep). */
  TVM_IPC_DEVICE Row(const NormArgs& args, uint64_t row, bool kept)
      : args_(args),
        state_(Shared<NormState>()),
        start_(row * args.row),
        from_(static_cast<const typename Type::Bits*>(args.residual_out) + start_),
        loaded_(kept ? 0 : ~0ull) {}

  TVM_IPC_DEVICE static bool Fits(uint64_t row) { return row <= kTile; }
  /*! \brief Store piece i of a row in the tile, in which the row must fit. A piece has 8 bytes. */
  TVM_IPC_DEVICE static void Keep(uint64_t row, uint64_t i, uint64_t eight) {
    NormState& state = Shared<NormState>();
#pragma unroll
    for (int k = 0; k < Type::kIn8; ++k) {
      const uint64_t at = i * Type::kIn8 + k;
      if (at < row) state.tile[at] = Type::Widen(At<Type>(eight, k));
    }
  }

  TVM_IPC_DEVICE void Normalise() {
    const bool centred = args_.bias != nullptr;
    const float size = static_cast<float>(args_.row);
    const float mean = centred ? Sum(0.0f, false) / size : 0.0f;
    const float squares = Sum(mean, true);
    const float scale = 1.0f / SquareRoot(squares / size + args_.epsilon);
    const bool fours = args_.row % 4 == 0 && IsAligned(args_.weight, 16) &&
                       IsAligned(args_.bias, 16) && IsAligned(args_.norm_out, 16);
    for (uint64_t tile = 0; tile < args_.row; tile += kTile) {
      const uint64_t count = Load(tile);
      fours ? Write<4>(tile, count, mean, scale) : Write<1>(tile, count, mean, scale);
    }
    SyncThreads();
  }

 private:
  /*! \brief Write the results of a tile, kWide elements at a time. */
  template <int kWide>
  TVM_IPC_DEVICE void Write(uint64_t tile, uint64_t count, float mean, float scale) const {
#pragma unroll 1
    for (uint64_t i = Thread() * kWide; i < count; i += Threads() * kWide) {
      float weights[kWide], values[kWide], biases[kWide];
      LoadFloats(args_.weight, tile + i, args_.weight_type, weights);
      if (args_.bias != nullptr) LoadFloats(args_.bias, tile + i, args_.bias_type, biases);
#pragma unroll
      for (int k = 0; k < kWide; ++k) {
        const float value = state_.tile[i + k];
        values[k] = args_.bias != nullptr ? (value - mean) * scale * weights[k] + biases[k]
                                          : value * scale * weights[k];
      }
      StoreFloats(args_.norm_out, start_ + tile + i, args_.out_type, values);
    }
  }

  /*! \brief Load a tile for all threads unless it is loaded; return its number of elements. */
  TVM_IPC_DEVICE uint64_t Load(uint64_t tile) {
    const uint64_t count = Least(args_.row - tile, kTile);
    if (loaded_ == tile) return count;
    SyncThreads();
#pragma unroll 4
    for (uint64_t i = Thread(); i < count; i += Threads()) {
      state_.tile[i] = Type::Widen(from_[tile + i]);
    }
    loaded_ = tile;
    SyncThreads();
    return count;
  }

  /*! \brief Return the sum of the elements' differences from `mean`, or of the squares of these. */
  TVM_IPC_DEVICE float Sum(float mean, bool squares) {
    for (uint64_t tile = 0; tile < args_.row; tile += kTile) {
      const uint64_t count = Load(tile);
      for (uint64_t lane = Thread(); lane < kNormLanes; lane += Threads()) {
        float sum = tile == 0 ? 0.0f : state_.lanes[lane];
#pragma unroll 16
        for (uint64_t i = lane; i < count; i += kNormLanes) {
          const float x = state_.tile[i] - mean;  // exactly the element, if the mean is 0
          sum += squares ? x * x : x;
        }
        state_.lanes[lane] = sum;
      }
    }
    SyncThreads();
    // Each thread adds all lanes itself: another barrier would take longer.
    float sums[kNormLanes / 2];
#pragma unroll
    for (uint32_t lane = 0; lane < kNormLanes / 2; ++lane) {
      sums[lane] = state_.lanes[lane] + state_.lanes[lane + kNormLanes / 2];
    }
#pragma unroll
    for (uint32_t round = 2; round <= 5; ++round) {
      const uint32_t half = kNormLanes >> round;
#pragma unroll
      for (uint32_t lane = 0; lane < kNormLanes / 4; ++lane) {
        if (lane < half) sums[lane] += sums[lane + half];
      }
    }
    SyncThreads();
    return sums[0];
  }

  const NormArgs& args_;
  NormState& state_;
  uint64_t start_;
  const typename Type::Bits* from_;
  uint64_t loaded_;
};

/*! \brief Add the residual to a rounded sum. */
template <typename Type>
TVM_IPC_DEVICE uint64_t AddResidual(uint64_t sum, uint64_t residual) {
  Fold<Type> fold;
  fold.Add(sum, kSum, true);
  fold.Add(residual, kSum, false);
  const uint64_t result = fold.Result(2, kSum);
  if (!fold.unusual()) return result;
  return FoldCarefully<Type>([&](int k) { return k == 0 ? sum : residual; }, 2, kSum);
}

/*! \brief The rows of a tensor, each split into pieces of 8 bytes from its own start. */
template <typename Type>
struct Rows {
  const void* data;
  uint64_t row;

  TVM_IPC_DEVICE Eights<Type::kWidth> operator[](uint64_t i) const {
    return Eights<Type::kWidth>(static_cast<const uint8_t*>(data) + i * row * Type::kWidth, row);
  }
};

TVM_IPC_DEVICE uint64_t RowsOf(const NormArgs& args) {
  return args.row == 0 ? 0 : Quotient(args.reduce.header.count, args.row);
}

/*! \brief Fetch the weight into the caches while the members wait for each other. */
TVM_IPC_DEVICE void PrefetchWeight(const NormArgs& args) {
  constexpr uint64_t kLine = 128;
  const uint64_t bytes = args.row * (args.weight_type == kFloat32 ? 4 : 2);
  for (uint64_t at = Thread() * kLine; at < bytes; at += Threads() * kLine) {
    Prefetch(static_cast<const uint8_t*>(args.weight) + at);
  }
}

/*! \brief Push a block's pieces of 8 bytes to all members, with several loads in flight. */
template <int kWidth>
TVM_IPC_DEVICE void PushAll(const TeamOperation& operation, const Stage& stage,
                            const Eights<kWidth>& send, uint64_t start, uint64_t end) {
  constexpr int kTogether = 4;
#pragma unroll 1
  for (uint64_t first = start + Thread(); first < end; first += kTogether * Threads()) {
    uint64_t pieces[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const uint64_t i = first + k * Threads();
      pieces[k] = i < end ? send.Load(i) : 0;
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const uint64_t i = first + k * Threads();
      if (i >= end) break;
      for (int shift = 1; shift < operation.size(); ++shift) {
        stage.Push(operation, operation.After(shift), i, pieces[k]);
      }
    }
  }
}

/*!
 * \brief Push and reduce the pieces of each row, with one block for each piece. The block that
 *        finishes the last piece of a row normalises the row.
 */
template <typename Type>
TVM_IPC_DEVICE void PushNorm(const NormArgs& args) {
  TeamOperation operation(args.reduce.team, args.reduce.header, Grid::kAny);
  if (!operation.Begin()) return;
  const int size = operation.size();
  TeamSlotMemory& team_slot = *args.reduce.team.team_slot[operation.place()];
  NormState& state = Shared<NormState>();
  const uint64_t eights = DivideUp(args.row * Type::kWidth, 8);
  const uint64_t piece = DivideUp(eights, args.pieces);
  // Rows and their pieces fit in 32 bits (see kMaxRows).
  const auto rows = static_cast<uint32_t>(RowsOf(args));
  const uint32_t items = rows * args.pieces;
  const uint32_t first = Block() - (Blocks() > 1);
  const uint32_t step = Blocks() - (Blocks() > 1);
  const Rows<Type> send{args.reduce.send, args.row};
  const Rows<Type> residual{args.residual, args.row};
  const Rows<Type> out{args.residual_out, args.row};
  const uint64_t stride = WholeStage(size).stride;
  const auto stage_of = [&](uint32_t row) { return Stage{row * eights, stride}; };
  const bool keeps = args.pieces == 1 && Row<Type>::Fits(args.row);

  if (operation.computes()) PrefetchWeight(args);
  if (operation.talks()) operation.Tell<false>();
  if (operation.computes()) {
#pragma unroll 1
    for (uint32_t item = first; item < items; item += step) {
      const uint32_t row = item / args.pieces;
      const uint64_t start = item % args.pieces * piece;
      PushAll(operation, stage_of(row), send[row], start, Least(start + piece, eights));
    }
  }
  if (operation.talks()) operation.Hear<false>();
  if (operation.computes()) {
#pragma unroll 1
    for (uint32_t item = first; item < items; item += step) {
      const uint32_t row = item / args.pieces;
      const uint64_t start = item % args.pieces * piece;
      const uint64_t end = Least(start + piece, eights);
#pragma unroll 1
      for (uint64_t i = start + Thread(); i < end; i += Threads()) {
        const uint64_t own = send[row].Load(i);
        const uint64_t last = residual[row].Load(i);
        uint64_t sum;
        if constexpr (Type::kWidth == 4) {
          // The accumulator has the element type, so the residual can be one more source.
          sum = FoldPushed<Type, true>(operation, stage_of(row), i, own, kSum, last);
        } else {
          sum = FoldPushed<Type>(operation, stage_of(row), i, own, kSum);
          sum = AddResidual<Type>(sum, last);
        }
        if (operation.failed()) break;
        out[row].Store(i, sum);
        if (keeps) Row<Type>::Keep(args.row, i, sum);
      }
      SyncThreads();
      if (Thread() == 0) {
        state.last = args.pieces == 1 || AddHere(&team_slot.rows[row], 1) == args.pieces - 1;
        if (args.pieces != 1 && state.last) StoreRelaxed(&team_slot.rows[row], 0);
      }
      SyncThreads();
      if (state.last) Row<Type>(args, row, keeps).Normalise();
    }
  }
  operation.End();
}

/*! \brief Add the residual to a tensor that is already reduced and normalise it, with one block for
 *         each row. */
template <typename Type>
TVM_IPC_DEVICE void LocalNorm(const NormArgs& args) {
  const uint64_t rows = RowsOf(args);
  const Rows<Type> sum{args.reduce.send, args.row};
  const Rows<Type> residual{args.residual, args.row};
  const Rows<Type> out{args.residual_out, args.row};
  const bool keeps = Row<Type>::Fits(args.row);
#pragma unroll 1
  for (uint64_t row = Block(); row < rows; row += Blocks()) {
    const auto to = out[row];
    for (uint64_t i = Thread(); i < to.size(); i += Threads()) {
      const uint64_t eight = AddResidual<Type>(sum[row].Load(i), residual[row].Load(i));
      to.Store(i, eight);
      if (keeps) Row<Type>::Keep(args.row, i, eight);
    }
    SyncThreads();
    Row<Type>(args, row, keeps).Normalise();
  }
}

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_ALLREDUCE_NORM_DEVICE_CODE_H_
