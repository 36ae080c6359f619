/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file run_matmul_piece_in_fixed_order.cc
 * \brief Computes a piece of a matmul whose sums have the order of Parts.
 *
 * The kernels of fixed_order_matmul_avx2.cc read the weights of few rows in place. For many rows,
 * both operands are widened, or transposed if they are not contiguous along k, into blocks of some
 * parts of k, which stay in a cache while they are used.
 */
#include <algorithm>

#include "blas/run_matmul_piece.h"
#include "blas/scratch_memory.h"
#include "blas/select_instruction_set.h"

namespace tvm_ipc {

#if defined(__x86_64__)
namespace {

// Bytes, columns, and the most steps of k of a block of b.
constexpr int64_t kBytesOfB = 256 << 10, kBlockOfCols = 64, kBlockOfSteps = 1024;
// The most rows for which float32 b, contiguous along k, is not copied.
constexpr int64_t kInPlaceRows = 32;
// Bytes and rows of a that are packed at once. b is read again for the rows after them.
constexpr int64_t kBytesOfA = 16 << 20, kMostRows = 512;
// Sums of few rows, and columns of many, after which steps are applied.
constexpr int64_t kFinishedFloats = 1 << 18, kFinishedCols = 1024;

thread_local Scratch scratch_x, scratch_w, scratch_sums, scratch_levels;

struct FixedOrderRunner : Piece {
  explicit FixedOrderRunner(const Piece& piece) : Piece(piece) {}

  const PackedKernels& packed = CurrentBlasKernels().packed;

  void Run() const {
    const Parts all{parts, a.cols / parts};
    if (a.rows <= (b.plain() ? kSkinnyRows : kFixedOrderKernels.few_rows)) {
      FewRowsInFixedOrder(all);
    } else {
      BlocksInFixedOrder(all);
    }
  }

  void FewRowsInFixedOrder(const Parts& all) const {
    const int64_t m = a.rows, n = b.cols, k = a.cols;
    const float* x = reinterpret_cast<const float*>(a.data);
    int64_t ldx = a.row;
    if (type != kFloat32 || a.col != 1) {
      float* widened = scratch_x.Floats(m * k);
      WidenTo(a, widened, k);
      x = widened;
      ldx = k;
    }
    if (b.plain()) {
      float* to = scratch_w.Floats(m * k);
      for (int64_t i = 0; i < m; ++i) OrderLanes(all, x + i * ldx, to + i * k);
      x = to;
      ldx = k;
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
        for (int64_t p = lane; p < all.size; p += kFixedOrderLanes) *to++ = from[p];
      }
    }
  }

  /*! \brief Widen `count` rows of a matrix as lines of `deep` elements, which are contiguous along
   *         its columns. */
  void PackAlongCols(const Matrix& from, float* to, int64_t ld) const {
    if (from.plain()) {
      packed.lines[type](from.data, from.row, from.rows, from.cols, from.cols, to, ld);
    } else {
      packed.transposed[type](from.data, from.col, from.cols, from.rows, from.cols, to, ld);
    }
  }

  /*! \brief Multiply blocks of some parts of k, one after another for each block of columns. */
  void BlocksInFixedOrder(const Parts& all) const {
    const int64_t m = a.rows, n = b.cols;
    Parts some{1, all.size};
    while (some.count < all.count && 2 * some.count * all.size <= kBlockOfSteps) some.count *= 2;
    const int64_t depth = some.count * some.size, units = all.count / some.count;
    // Rows whose distance is a large power of two would compete for a set of the cache.
    const int64_t ld = (depth + 15) / 16 * 16 + 16;
    const int64_t fitting = kBytesOfA / (units * ld * 4);
    const int64_t most = std::clamp<int64_t>(fitting, 48, kMostRows);
    const int64_t blocks = (m + most - 1) / most, height = (m + blocks - 1) / blocks;
    const int64_t width = std::clamp<int64_t>(kBytesOfB / (ld * 4) / 4 * 4, 4, kBlockOfCols);
    const bool direct = target_type == kFloat32;
    // Copying b costs more than it saves for few rows.
    const bool in_place = type == kFloat32 && !b.plain() && m <= kInPlaceRows;
    float* of_a = scratch_x.Floats(units * height * ld);
    float* of_b = scratch_w.Floats(width * ld);
    const int64_t level_floats =
        __builtin_ctzll(units) * kFixedOrderKernels.level_size(height, width);
    float* levels = scratch_sums.Floats(level_floats + (direct ? 0 : height * kFinishedCols));
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t i = m * block / blocks, rows = m * (block + 1) / blocks - i;
      for (int64_t unit = 0; unit < units; ++unit) {
        PackAlongCols(a.Block(type, i, rows, unit * depth, depth), of_a + unit * rows * ld, ld);
      }
      for (int64_t first = 0; first < n; first += kFinishedCols) {
        const int64_t end = std::min(n, first + kFinishedCols);
        float* to = direct ? reinterpret_cast<float*>(At(i, first)) : levels + level_floats;
        const int64_t ld_to = direct ? ld_target : kFinishedCols;
        for (int64_t j = first; j < end; j += width) {
          const int64_t cols = std::min(width, end - j);
          for (int64_t unit = 0; unit < units; ++unit) {
            const Matrix lines = b.Block(type, unit * depth, depth, j, cols).Transposed();
            FixedOrderBlock part{
                of_a + unit * rows * ld, ld, rows, of_b, ld, cols, some, unit, units};
            if (in_place) {
              part.weights = reinterpret_cast<const float*>(lines.data);
              part.ldw = lines.row;
            } else {
              PackAlongCols(lines, of_b, ld);
            }
            const bool same = unit + 1 < units;
            const int64_t next = same ? j : j + width;
            if (next < n) {
              const int64_t row = same ? unit * depth + depth : 0;
              const Matrix ahead = b.Block(type, row, depth, next, std::min(width, n - next));
              part.next = ahead.data;
              part.next_stride = b.ld() * SizeOf(type);
              part.next_lines = b.plain() ? depth : ahead.cols;
              part.next_bytes = (b.plain() ? ahead.cols : depth) * SizeOf(type);
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
#else
void RunPieceInFixedOrder(const Piece&) {}  // OrdersSums returns false
#endif

}  // namespace tvm_ipc
