/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file run_matmul_piece_in_fixed_order.cc
 * \brief Computes a piece of a matmul whose sums have the order of Parts.
 *
 * The kernels of fixed_order_matmul_avx2.cc read the weights of few rows in place. For many rows,
 * both operands are widened and packed as blocks of some parts of k, which stay in a cache while
 * they are used. Zeros follow the steps of a part, up to a multiple of kFixedOrderGroup.
 */
#include <algorithm>

#include "blas/run_matmul_piece.h"
#include "blas/scratch_memory.h"
#include "blas/select_instruction_set.h"

namespace tvm_ipc {

#if defined(__x86_64__)
namespace {

// Bytes, columns, and the most steps of k of a block of b.
constexpr int64_t kBytesOfB = 128 << 10, kBlockOfCols = 64, kBlockOfSteps = 512;
// Bytes and rows of a that are packed at once. b is read again for the rows after them.
constexpr int64_t kBytesOfA = 16 << 20, kMostRows = 512;
// Sums of few rows, and columns of many, after which steps are applied.
constexpr int64_t kFinishedFloats = 1 << 18, kFinishedCols = 1024;

thread_local Scratch scratch_x, scratch_w, scratch_sums, scratch_levels;

struct FixedOrderRunner : Piece {
  explicit FixedOrderRunner(const Piece& piece) : Piece(piece) {}

  const PackedKernels& packed = CurrentBlasKernels().packed;

  void Run() const {
    if (HasFewRows()) {
      FewRowsInFixedOrder({parts, a.cols / parts});
    } else {
      BlocksInFixedOrder();
    }
  }

  bool HasFewRows() const {
    return a.rows <= (b.plain() ? kSkinnyRows : kFixedOrderKernels.few_rows);
  }

  void FewRowsInFixedOrder(const Parts& all) const {
    const int64_t m = a.rows, n = b.cols, k = a.cols;
    const int64_t ldx = b.plain() ? k : RowStride(all.count * PaddedSteps(all.size));
    float* x = scratch_x.Floats(m * ldx);
    if (b.plain()) {
      float* widened = scratch_w.Floats(m * k);
      WidenTo(a, widened, k);
      for (int64_t i = 0; i < m; ++i) OrderLanes(all, widened + i * k, x + i * k);
    } else {
      PackRows(a, all, x, ldx);
    }
    const int64_t vectors = kFixedOrderLanes + __builtin_ctzll(all.count);
    float* scratch = b.plain() ? scratch_levels.Floats(vectors * kAlongNFloats) : nullptr;
    const bool direct = target_type == kFloat32, finish = !direct || num_steps > 0;
    // The sums stay in a cache until the steps are applied.
    const int64_t most = finish ? std::max<int64_t>(64, kFinishedFloats / m / 64 * 64) : n;
    const int64_t cols = std::min(n, most);
    for (int64_t j = 0; j < n; j += cols) {
      const int64_t width = std::min(cols, n - j);
      float* sums = direct ? reinterpret_cast<float*>(At(0, j)) : scratch_sums.Floats(m * cols);
      const int64_t ld = direct ? ld_target : cols;
      const Weights weights{b.Block(type, 0, k, j, width).data, b.ld()};
      if (b.plain()) {
        kFixedOrderKernels.along_n[type][m - 1](x, ldx, weights, all, width, sums, ld, scratch);
      } else {
        kFixedOrderKernels.few[type](x, ldx, m, weights, all, width, sums, ld);
      }
      if (finish) Finish(sums, ld, 0, m, j, width);
    }
  }

  /*! \brief Store the lanes of each part one after another (see FixedOrderKernels::along_n). */
  static void OrderLanes(const Parts& all, const float* from, float* to) {
    for (int64_t part = 0; part < all.count; ++part, from += all.size) {
      for (int64_t lane = 0; lane < kFixedOrderLanes; ++lane) {
        for (int64_t p = 2 * lane; p < all.size; p += p % 2 == 0 ? 1 : kFixedOrderGroup - 1) {
          *to++ = from[p];
        }
      }
    }
  }

  /*! \brief Return the stride of packed rows of `depth` steps. Packing stores whole vectors, of up
   *         to 16 floats, and rows whose distance is a large power of two would compete for a set
   * of the cache. */
  static int64_t RowStride(int64_t depth) { return (depth + 15) / 16 * 16 + 16; }

  /*! \brief Widen rows of a as FixedOrderKernels expects x, `ld` floats apart (see RowStride). */
  void PackRows(const Matrix& from, const Parts& some, float* to, int64_t ld) const {
    const int64_t padded = PaddedSteps(some.size);
    // Parts without padding are one.
    const Parts runs = padded == some.size ? Parts{1, some.count * some.size} : some;
    for (int64_t part = 0; part < runs.count; ++part) {
      const Matrix steps = from.Block(type, 0, from.rows, part * runs.size, runs.size);
      float* at = to + part * padded;
      if (steps.plain()) {
        packed.lines[type](steps.data, steps.row, steps.rows, steps.cols, steps.cols, at, ld);
      } else {
        packed.transposed[type](steps.data, steps.col, steps.cols, steps.rows, steps.cols, at, ld);
      }
      for (int64_t i = 0; i < from.rows && padded > runs.size; ++i) {
        std::fill(at + i * ld + runs.size, at + i * ld + padded, 0.0f);
      }
    }
    for (int64_t i = 0; i < from.rows; ++i) {
      kFixedOrderKernels.order_steps(to + i * ld, some.count * padded);
    }
  }

  /*! \brief Pack columns of b as FixedOrderBlock::weights. */
  void PackColumns(const Matrix& from, const Parts& some, float* to) const {
    const int64_t padded = PaddedSteps(some.size);
    const Parts runs = padded == some.size ? Parts{1, some.count * some.size} : some;
    const int64_t tile = kFixedOrderCols * padded * some.count;
    const auto pack =
        (from.plain() ? kFixedOrderKernels.pack_along_n : kFixedOrderKernels.pack_along_k)[type];
    for (int64_t part = 0; part < runs.count; ++part, to += padded * kFixedOrderCols) {
      const Matrix steps = from.Block(type, part * runs.size, runs.size, 0, from.cols);
      pack(steps.data, steps.ld(), steps.rows, steps.cols, to, tile);
    }
  }

  /*! \brief How k is divided into blocks of some parts each, and rows of a into blocks. */
  struct Blocking {
    Parts some;     // of a block of k
    int64_t steps;  // of k in a block
    int64_t depth;  // the same with the zeros after each part
    int64_t units;  // blocks of k
    int64_t ld;     // distance of packed rows
    int64_t most;   // rows that are packed at once
  };

  Blocking ChooseBlocks() const {
    const int64_t size = a.cols / parts, padded = PaddedSteps(size);
    Parts some{1, size};
    while (some.count < parts && 2 * some.count * padded <= kBlockOfSteps) some.count *= 2;
    const int64_t depth = some.count * padded, units = parts / some.count, ld = RowStride(depth);
    const int64_t fitting = kBytesOfA / (units * ld * 4);
    const int64_t most = std::clamp<int64_t>(fitting, 48, kMostRows);
    return {some, some.count * size, depth, units, ld, most};
  }

  /*! \brief Pack `count` rows of a, from `first` on, of the rows [i, i + rows) that are packed at
   *         once: all rows of each block of k. */
  void PackRowsOf(const Blocking& by, int64_t i, int64_t rows, int64_t first, int64_t count,
                  float* to) const {
    // A whole row at a time, because the processor prefetches what is read in the order of memory.
    const int64_t at_once = a.plain() ? 1 : count;
    for (int64_t r = first; r < first + count; r += at_once) {
      for (int64_t unit = 0; unit < by.units; ++unit) {
        const Matrix steps = a.Block(type, i + r, at_once, unit * by.steps, by.steps);
        PackRows(steps, by.some, to + (unit * rows + r) * by.ld, by.ld);
      }
    }
  }

  /*! \brief Multiply blocks of some parts of k, one after another for each block of columns. */
  void BlocksInFixedOrder() const {
    const int64_t m = a.rows, n = b.cols;
    const Blocking by = ChooseBlocks();
    const auto& [some, steps, depth, units, ld, most] = by;
    const int64_t padded = PaddedSteps(some.size);
    const int64_t blocks = (m + most - 1) / most, height = (m + blocks - 1) / blocks;
    const int64_t width = std::clamp<int64_t>(
        kBytesOfB / (depth * 4) / kFixedOrderCols * kFixedOrderCols, kFixedOrderCols, kBlockOfCols);
    const bool direct = target_type == kFloat32;
    float* of_b = scratch_w.Floats(width * depth);
    const int64_t level_floats =
        __builtin_ctzll(units) * kFixedOrderKernels.level_size(height, width);
    float* levels = scratch_sums.Floats(level_floats + (direct ? 0 : height * kFinishedCols));
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t i = m * block / blocks, rows = m * (block + 1) / blocks - i;
      const float* of_a = packed_a;  // not nullptr if they were packed for all pieces
      if (of_a == nullptr) {
        float* const own = scratch_x.Floats(units * rows * ld);
        PackRowsOf(by, i, rows, 0, rows, own);
        of_a = own;
      }
      for (int64_t first = 0; first < n; first += kFinishedCols) {
        const int64_t end = std::min(n, first + kFinishedCols);
        float* to = direct ? reinterpret_cast<float*>(At(i, first)) : levels + level_floats;
        const int64_t ld_to = direct ? ld_target : kFinishedCols;
        for (int64_t j = first; j < end; j += width) {
          const int64_t cols = std::min(width, end - j);
          for (int64_t unit = 0; unit < units; ++unit) {
            PackColumns(b.Block(type, unit * steps, steps, j, cols), some, of_b);
            FixedOrderBlock part{of_a + unit * rows * ld, ld,   rows, of_b, cols,
                                 {some.count, padded},    unit, units};
            const bool same = unit + 1 < units;
            const int64_t next = same ? j : j + width;
            if (next < n) {
              const int64_t row = same ? unit * steps + steps : 0;
              const Matrix ahead = b.Block(type, row, steps, next, std::min(width, n - next));
              part.next = ahead.data;
              part.next_stride = b.ld() * SizeOf(type);
              part.next_lines = b.plain() ? steps : ahead.cols;
              part.next_bytes = (b.plain() ? ahead.cols : steps) * SizeOf(type);
            }
            kFixedOrderKernels.block(part, levels, to + (j - first), ld_to);
          }
        }
        if (!direct || num_steps > 0) Finish(to, ld_to, i, rows, first, end - first);
      }
    }
  }
};

}  // namespace

void RunPieceInFixedOrder(const Piece& piece) { FixedOrderRunner(piece).Run(); }

PackedRows RowsToPackInFixedOrder(const Piece& piece) {
  const FixedOrderRunner runner(piece);
  if (runner.HasFewRows()) return {0, 0};
  const auto by = runner.ChooseBlocks();
  return {by.most, by.units * piece.a.rows * by.ld};
}

void PackRowsInFixedOrder(const Piece& piece, int64_t first, int64_t count, float* to) {
  const FixedOrderRunner runner(piece);
  runner.PackRowsOf(runner.ChooseBlocks(), 0, piece.a.rows, first, count, to);
}
#else
// OrdersSums returns false.
void RunPieceInFixedOrder(const Piece&) {}
PackedRows RowsToPackInFixedOrder(const Piece&) { return {0, 0}; }
void PackRowsInFixedOrder(const Piece&, int64_t, int64_t, float*) {}
#endif

}  // namespace tvm_ipc
