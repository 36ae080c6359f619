/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file matmul_multi_thread.cc
 * \brief Splits a matmul into pieces for threads.
 */
#include "blas/matmul_multi_thread.h"

#include <algorithm>

#include "blas/run_matmul_piece.h"
#include "blas/scratch_memory.h"

namespace tvm_ipc {
namespace {

// Work that makes it worthwhile to wake one more thread: multiplications, or bytes of weights where
// every weight is used once per row.
constexpr double kWorkPerThread = 4e6;
constexpr double kBytesPerThread = 1e6;
// Threads claim tasks of half of this work or more, so that a delayed thread delays one of them.
constexpr int kTasksPerThread = 4;
// Pieces begin at multiples of this, and none is smaller: kernels for few rows add in another
// order.
constexpr int64_t kGrain = 32;

/*! \brief Fold batch dimensions into the rows of one matrix, where the rows of a follow each other
 *         in memory and are multiplied by the same b. */
void FoldBatch(Product* p) {
  // Drop dimensions of size 1.
  int kept = 0;
  auto move = [&](int from, int to) {
    p->batch[to] = p->batch[from];
    p->a.batch[to] = p->a.batch[from];
    p->b.batch[to] = p->b.batch[from];
    for (int s = 0; s < p->num_steps; ++s) {
      p->operands[s].batch[to] = p->operands[s].batch[from];
    }
  };
  for (int d = 0; d < p->batch_dims; ++d) {
    if (p->batch[d] != 1) move(d, kept++);
  }
  p->batch_dims = kept;
  while (p->batch_dims > 0) {
    const int d = p->batch_dims - 1;
    auto follows = [&](const MatrixBatch& x) {
      return p->m == 1 || x.batch[d] == p->m * x.row_stride;
    };
    bool fold =
        p->b.batch[d] == 0 && follows(p->a) && (p->a.col_stride == 1 || p->k == 1 || p->m > 1);
    for (int s = 0; s < p->num_steps && fold; ++s) {
      if (p->operands[s].data != nullptr) fold = follows(p->operands[s]);
    }
    if (!fold) return;
    if (p->m == 1) {
      p->a.row_stride = p->a.batch[d];
      for (int s = 0; s < p->num_steps; ++s) {
        p->operands[s].row_stride = p->operands[s].batch[d];
      }
    }
    p->m *= p->batch[d];
    --p->batch_dims;
  }
}

/*! \brief Transpose a product of one column into one row; the memory of the target is the same. */
void TurnColumn(Product* p) {
  if (p->n != 1 || p->m == 1) return;
  std::swap(p->m, p->n);
  std::swap(p->a, p->b);
  std::swap(p->a.row_stride, p->a.col_stride);
  std::swap(p->b.row_stride, p->b.col_stride);
  for (int s = 0; s < p->num_steps; ++s) {
    std::swap(p->operands[s].row_stride, p->operands[s].col_stride);
  }
}

/*! \brief Packs the rows of a, kTileEdge of them in each unit. */
struct RowPacking {
  const Piece& piece;
  float* to;
  int64_t units() const { return (piece.a.rows + kTileEdge - 1) / kTileEdge; }
  void RunUnit(int64_t unit) const {
    const int64_t first = unit * kTileEdge;
    PackRows(piece, first, std::min(kTileEdge, piece.a.rows - first), to);
  }
};

/*! \brief The pieces of a product; a unit is some of them. */
struct Job {
  const BlasLibrary& blas;
  const Product& product;
  int64_t places;
  bool by_rows;
  int64_t pieces = 1;  // of each matrix of the batch
  int64_t units = 1;
  int64_t first_row = 0, rows = product.m;  // of pieces of columns
  float* packed_a = nullptr;                // these rows, if the pieces share them

  /*! \brief Return where piece `index` of `pieces` begins: a multiple that suits the kernels. */
  int64_t Cut(int64_t size, int64_t index) const {
    if (index == 0) return 0;
    if (index == pieces) return size;
    return (size * index / pieces) / kGrain * kGrain;
  }

  void RunUnit(int64_t unit) const {
    const int64_t all = places * pieces, end = all * (unit + 1) / units;
    for (int64_t index = all * unit / units; index < end; ++index) {
      const int64_t place = index / pieces, piece = index % pieces;
      if (by_rows) {
        RunBlock(place, Cut(product.m, piece), Cut(product.m, piece + 1), 0, product.n);
      } else {
        const int64_t begin = Cut(product.n, piece), end = Cut(product.n, piece + 1);
        RunBlock(place, first_row, first_row + rows, begin, end);
      }
    }
  }

  /*! \brief Compute the rows [i0, i1) and the columns [j0, j1) of a matrix of the batch. */
  void RunBlock(int64_t place, int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
    if (i0 == i1 || j0 == j1) return;
    Step steps[kMaxSteps];
    RunPiece(PieceAt(place, i0, i1, j0, j1, steps));
  }

  Piece PieceAt(int64_t place, int64_t i0, int64_t i1, int64_t j0, int64_t j1, Step* steps) const {
    const Product& p = product;
    int64_t at_a = 0, at_b = 0, at_step[kMaxSteps];
    for (int s = 0; s < p.num_steps; ++s) at_step[s] = 0;
    int64_t rest = place;
    for (int d = p.batch_dims - 1; d >= 0; --d) {
      const int64_t index = rest % p.batch[d];
      rest /= p.batch[d];
      at_a += index * p.a.batch[d];
      at_b += index * p.b.batch[d];
      for (int s = 0; s < p.num_steps; ++s) at_step[s] += index * p.operands[s].batch[d];
    }
    const int64_t size = SizeOf(p.type);
    Matrix a{p.a.data + at_a * size, p.m, p.k, p.a.row_stride, p.a.col_stride};
    Matrix b{p.b.data + at_b * size, p.k, p.n, p.b.row_stride, p.b.col_stride};
    a.Settle();
    b.Settle();
    for (int s = 0; s < p.num_steps; ++s) {
      const MatrixBatch& operand = p.operands[s];
      steps[s] = p.steps[s];
      steps[s].row_stride = operand.row_stride;
      steps[s].col_stride = operand.col_stride;
      if (operand.data != nullptr) {
        steps[s].operand =
            operand.data + (at_step[s] + i0 * operand.row_stride + j0 * operand.col_stride) *
                               SizeOf(p.steps[s].type);
      }
    }
    return {blas,
            p.type,
            p.target_type,
            a.Block(p.type, i0, i1 - i0, 0, p.k),
            b.Block(p.type, 0, p.k, j0, j1 - j0),
            p.target + ((place * p.m + i0) * p.n + j0) * SizeOf(p.target_type),
            p.n,
            p.num_steps,
            steps,
            p.parts,
            packed_a};
  }

  /*! \brief Compute the only matrix on several threads, which pack rows of a for all pieces first.
   *         Return false if its pieces do not pack them. */
  bool RunWithSharedRows(const Threads& threads, int used) {
    static thread_local Scratch scratch;
    Step steps[kMaxSteps];
    const int64_t m = product.m, n = product.n;
    const int64_t most = RowsToPack(PieceAt(0, 0, m, 0, n, steps)).most;
    const int64_t blocks = most == 0 ? 0 : (m + most - 1) / most;
    if (blocks == 0 || m / blocks < kGrain) return false;
    for (int64_t block = 0; block < blocks; ++block) {
      first_row = m * block / blocks;
      rows = m * (block + 1) / blocks - first_row;
      const Piece piece = PieceAt(0, first_row, first_row + rows, 0, n, steps);
      packed_a = scratch.Floats(RowsToPack(piece).floats);
      RowPacking packing{piece, packed_a};
      RunUnits(threads, used, packing.units(), &packing);
      RunUnits(threads, used, units, this);
    }
    return true;
  }
};

}  // namespace

void Multiply(const BlasLibrary& blas, Product* product, const Threads& threads) {
  FoldBatch(product);
  TurnColumn(product);
  const Product& p = *product;
  int64_t places = 1;
  for (int d = 0; d < p.batch_dims; ++d) places *= p.batch[d];
  if (places == 0 || p.m == 0 || p.n == 0) return;
  Job job{blas, p, places, p.m > p.n};
  // Memory bandwidth limits products of few rows, multiplications those of many.
  const double products = static_cast<double>(places) * p.m * p.n * p.k;
  const double bytes = static_cast<double>(places) * p.n * p.k * SizeOf(p.type);
  const double worth = std::max(products / kWorkPerThread, bytes / kBytesPerThread);
  const int used = worth < 2 ? 1 : static_cast<int>(std::min<double>(threads.count(), worth));
  if (used == 1) return job.RunUnit(0);
  job.units = used * static_cast<int64_t>(std::clamp<double>(2 * worth / used, 1, kTasksPerThread));
  if (places < job.units) {
    const int64_t most = std::max<int64_t>(1, std::max(p.m, p.n) / kGrain);
    job.pieces = std::min(most, (job.units + places - 1) / places);
  }
  if (places == 1 && !job.by_rows && job.RunWithSharedRows(threads, used)) return;
  RunUnits(threads, used, job.units, &job);
}

}  // namespace tvm_ipc
