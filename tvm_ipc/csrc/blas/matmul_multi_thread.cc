/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file matmul_multi_thread.cc
 * \brief Splits a matmul into pieces for threads.
 */
#include "blas/matmul_multi_thread.h"

#include <algorithm>

#include "blas/run_matmul_piece.h"

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

struct Job {
  const BlasLibrary& blas;
  const Product& product;
  int64_t places;
  bool by_rows;
  int64_t pieces = 1;  // of each matrix of the batch
  int64_t tasks = 1;

  /*! \brief Return where piece `index` of `pieces` begins: a multiple that suits the kernels. */
  int64_t Cut(int64_t size, int64_t index) const {
    if (index == 0) return 0;
    if (index == pieces) return size;
    return (size * index / pieces) / kGrain * kGrain;
  }

  void RunTask(int64_t task) const {
    const int64_t units = places * pieces;
    const int64_t end = units * (task + 1) / tasks;
    for (int64_t unit = units * task / tasks; unit < end; ++unit) RunUnit(unit);
  }

  void RunUnit(int64_t unit) const {
    const Product& p = product;
    const int64_t place = pieces == 1 ? unit : unit / pieces;
    const int64_t piece = unit - place * pieces;
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
    const int64_t i0 = by_rows ? Cut(p.m, piece) : 0, i1 = by_rows ? Cut(p.m, piece + 1) : p.m;
    const int64_t j0 = by_rows ? 0 : Cut(p.n, piece), j1 = by_rows ? p.n : Cut(p.n, piece + 1);
    if (i0 == i1 || j0 == j1) return;
    Matrix a{p.a.data + at_a * size, p.m, p.k, p.a.row_stride, p.a.col_stride};
    Matrix b{p.b.data + at_b * size, p.k, p.n, p.b.row_stride, p.b.col_stride};
    a.Settle();
    b.Settle();
    Step steps[kMaxSteps];
    const Piece part{blas,
                     p.type,
                     p.target_type,
                     a.Block(p.type, i0, i1 - i0, 0, p.k),
                     b.Block(p.type, 0, p.k, j0, j1 - j0),
                     p.target + ((place * p.m + i0) * p.n + j0) * SizeOf(p.target_type),
                     p.n,
                     p.num_steps,
                     steps,
                     p.parts};
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
    RunPiece(part);
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
  if (used == 1) return job.RunTask(0);
  job.tasks = used * static_cast<int64_t>(std::clamp<double>(2 * worth / used, 1, kTasksPerThread));
  if (places < job.tasks) {
    const int64_t most = std::max<int64_t>(1, std::max(p.m, p.n) / kGrain);
    job.pieces = std::min(most, (job.tasks + places - 1) / places);
  }
  threads.run(
      used, static_cast<int>(job.tasks),
      [](int task, void* data) { static_cast<const Job*>(data)->RunTask(task); }, &job);
}

}  // namespace tvm_ipc
