/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file norm.h
 * \brief All-reduce, the addition of a residual, and the norm of its rows.
 *
 * As on the CPU, with the same bits (but for the payload of a NaN in float32): the sum is rounded,
 * the residual added, that rounded, and the norm is of what was rounded. Sums along a row are those
 * of 32 lanes, element i in lane i % 32, added in a tree; a variance is that of the differences
 * from the mean.
 */
#ifndef TVM_IPC_CUDA_KERNELS_NORM_H_
#define TVM_IPC_CUDA_KERNELS_NORM_H_

#include "cuda/kernels/push.h"

namespace tvm_ipc {
namespace kernels {

constexpr uint32_t kNormLanes = 32;
/*! \brief Elements of a row that a block has at hand; what is more it reads again. */
constexpr uint64_t kTile = 8192;

struct NormState {
  float tile[kTile];
  float lanes[kNormLanes];
  uint32_t last;
};

TVM_IPC_DEVICE float LoadFloat(const void* data, uint64_t i, uint32_t type) {
  if (type == kFloat32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return type == kFloat16 ? WidenHalf(bits) : WidenBFloat(bits);
}

TVM_IPC_DEVICE void StoreFloat(void* data, uint64_t i, uint32_t type, float value) {
  if (type == kFloat32) {
    static_cast<float*>(data)[i] = value;
    return;
  }
  const bool nan = value != value;
  uint16_t bits = nan ? 0x7e00 : NarrowHalf(value);
  if (type == kBFloat16) bits = nan ? 0x7fc0 : NarrowBFloat(value);
  static_cast<uint16_t*>(data)[i] = bits;
}

/*! \brief A row of residual_out, by a block. */
template <typename Type>
class Row {
 public:
  TVM_IPC_DEVICE Row(const NormArgs& args, uint64_t row)
      : args_(args),
        state_(Shared<NormState>()),
        start_(row * args.row),
        from_(static_cast<const typename Type::Bits*>(args.residual_out) + start_) {}

  TVM_IPC_DEVICE void Normalise() {
    const bool centred = args_.bias != nullptr;
    const float size = static_cast<float>(args_.row);
    const float mean = centred ? Sum(0.0f, false) / size : 0.0f;
    const float squares = Sum(mean, true);
    const float scale = 1.0f / SquareRoot(squares / size + args_.epsilon);
    for (uint64_t tile = 0; tile < args_.row; tile += kTile) {
      const uint64_t count = Load(tile);
      for (uint64_t i = Thread(); i < count; i += Threads()) {
        const float weight = LoadFloat(args_.weight, tile + i, args_.weight_type);
        float value = state_.tile[i];
        if (centred) {
          const float bias = LoadFloat(args_.bias, tile + i, args_.bias_type);
          value = (value - mean) * scale * weight + bias;
        } else {
          value = value * scale * weight;
        }
        StoreFloat(args_.norm_out, start_ + tile + i, args_.out_type, value);
      }
    }
    SyncThreads();
  }

 private:
  /*! \brief A tile, unless it is there; how many elements it has. All threads have it after this.
   */
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

  /*! \brief Of the elements, or of the squares of their differences from the mean. */
  TVM_IPC_DEVICE float Sum(float mean, bool squares) {
    for (uint64_t tile = 0; tile < args_.row; tile += kTile) {
      const uint64_t count = Load(tile);
      for (uint64_t lane = Thread(); lane < kNormLanes; lane += Threads()) {
        float sum = tile == 0 ? 0.0f : state_.lanes[lane];
#pragma unroll 8
        for (uint64_t i = lane; i < count; i += kNormLanes) {
          const float x = state_.tile[i] - mean;  // exactly the element, if it is 0
          sum += squares ? x * x : x;
        }
        state_.lanes[lane] = sum;
      }
    }
    for (uint32_t half = kNormLanes / 2; half > 0; half /= 2) {
      SyncThreads();
      for (uint32_t lane = Thread(); lane < half; lane += Threads()) {
        state_.lanes[lane] += state_.lanes[lane + half];
      }
    }
    SyncThreads();
    const float sum = state_.lanes[0];
    SyncThreads();
    return sum;
  }

  const NormArgs& args_;
  NormState& state_;
  uint64_t start_;
  const typename Type::Bits* from_;
  uint64_t loaded_ = ~0ull;
};

/*! \brief A sum that was rounded, and the residual. */
template <typename Type>
TVM_IPC_DEVICE uint64_t AddResidual(uint64_t sum, uint64_t residual) {
  Fold<Type> fold;
  fold.Add(sum, kSum, true);
  fold.Add(residual, kSum, false);
  const uint64_t result = fold.Result(2, kSum);
  if (!fold.unusual()) return result;
  return FoldCarefully<Type>([&](int k) { return k == 0 ? sum : residual; }, 2, kSum);
}

/*! \brief Rows of a tensor, each in pieces of 8 bytes of its own. */
template <typename Type>
struct Rows {
  const void* data;
  uint64_t row;

  TVM_IPC_DEVICE Eights<Type::kWidth> operator[](uint64_t i) const {
    return Eights<Type::kWidth>(static_cast<const uint8_t*>(data) + i * row * Type::kWidth, row);
  }
};

/*!
 * \brief Pieces of rows are pushed and reduced by as many blocks; the last one to do a piece of a
 *        row normalises it.
 */
template <typename Type>
TVM_IPC_DEVICE void PushNorm(const NormArgs& args) {
  TeamOperation operation(args.reduce.team, args.reduce.header, Grid::kAny);
  if (!operation.Begin()) return;
  const int size = operation.size();
  SeatMemory& seat = *args.reduce.team.seat[operation.place()];
  NormState& state = Shared<NormState>();
  const uint64_t eights = DivideUp(args.row * Type::kWidth, 8);
  const uint64_t piece = DivideUp(eights, args.pieces);
  const uint64_t items = args.row == 0 ? 0 : args.reduce.header.count / args.row * args.pieces;
  const uint32_t first = Block() - (Blocks() > 1);
  const uint32_t step = Blocks() - (Blocks() > 1);
  const Rows<Type> send{args.reduce.send, args.row};
  const Rows<Type> residual{args.residual, args.row};
  const Rows<Type> out{args.residual_out, args.row};
  const auto for_pieces = [&](uint64_t item, const auto& function) {
    const uint64_t start = item % args.pieces * piece;
    const uint64_t end = Least(start + piece, eights);
#pragma unroll 1
    for (uint64_t i = start + Thread(); i < end; i += Threads()) function(item / args.pieces, i);
  };
  const auto stage_of = [&](uint64_t row) { return Stage{row * eights, WholeStage(size).stride}; };

  if (operation.talks()) operation.Tell<false>();
  if (operation.works()) {
#pragma unroll 1
    for (uint64_t item = first; item < items; item += step) {
      for_pieces(item, [&](uint64_t row, uint64_t i) {
        const uint64_t eight = send[row].Load(i);
        for (int shift = 1; shift < size; ++shift) {
          stage_of(row).Push(operation, operation.After(shift), i, eight);
        }
      });
    }
  }
  if (operation.talks()) operation.Hear<false>();
  if (operation.works()) {
#pragma unroll 1
    for (uint64_t item = first; item < items; item += step) {
      for_pieces(item, [&](uint64_t row, uint64_t i) {
        if (operation.failed()) return;
        const uint64_t own = send[row].Load(i);
        const uint64_t last = residual[row].Load(i);
        uint64_t sum;
        if constexpr (Type::kWidth == 4) {
          // The accumulator is the type itself: the residual is one more source.
          sum = FoldPushed<Type, true>(operation, stage_of(row), i, own, kSum, last);
        } else {
          sum = FoldPushed<Type>(operation, stage_of(row), i, own, kSum);
          sum = AddResidual<Type>(sum, last);
        }
        if (!operation.failed()) out[row].Store(i, sum);
      });
      const uint64_t row = item / args.pieces;
      SyncThreads();
      if (Thread() == 0) {
        state.last = args.pieces == 1 || AddHere(&seat.rows[row], 1) == args.pieces - 1;
        if (args.pieces != 1 && state.last) StoreRelaxed(&seat.rows[row], 0);
      }
      SyncThreads();
      if (state.last) Row<Type>(args, row).Normalise();
    }
  }
  operation.End();
}

/*! \brief Of what is reduced already, a row to a block. */
template <typename Type>
TVM_IPC_DEVICE void LocalNorm(const NormArgs& args) {
  const uint64_t rows = args.row == 0 ? 0 : args.reduce.header.count / args.row;
  const Rows<Type> sum{args.reduce.send, args.row};
  const Rows<Type> residual{args.residual, args.row};
  const Rows<Type> out{args.residual_out, args.row};
#pragma unroll 1
  for (uint64_t row = Block(); row < rows; row += Blocks()) {
    const auto to = out[row];
    for (uint64_t i = Thread(); i < to.size(); i += Threads()) {
      to.Store(i, AddResidual<Type>(sum[row].Load(i), residual[row].Load(i)));
    }
    SyncThreads();
    Row<Type>(args, row).Normalise();
  }
}

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_NORM_H_
