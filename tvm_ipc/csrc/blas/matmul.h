/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file matmul.h
 * \brief Products of matrices with what follows them: batches, epilogues, types, threads.
 *
 *   target[batch] = steps(a[batch] b[batch])
 *
 * Operands are read where they lie, through strides; nothing is copied but 16-bit floats, which
 * are widened block by block in a cache. Sums and steps are float32 (float64 of float64), and are
 * rounded once, when they are stored. The work is cut along batches, rows or columns, never along
 * the sum, and steps work on single elements.
 */
#ifndef TVM_IPC_BLAS_MATMUL_H_
#define TVM_IPC_BLAS_MATMUL_H_

#include <cstdint>

#include "blas/kernels.h"
#include "blas/library.h"
#include "blas/matmul_piece.h"

namespace tvm_ipc {

constexpr int kMaxBatchDims = 6;

/*! \brief A matrix in each place of a batch; all strides in elements. */
struct MatrixBatch {
  const char* data;
  int64_t row_stride;
  int64_t col_stride;
  int64_t batch[kMaxBatchDims];  // as many as the product has
};

struct Product {
  FloatType type;         // of a and b
  FloatType target_type;  // float64 if `type` is, and only then
  int64_t m, n, k;
  int batch_dims;
  int64_t batch[kMaxBatchDims];
  MatrixBatch a, b;
  char* target;  // contiguous: batch, m, n
  int num_steps;
  Step steps[kMaxSteps];
  MatrixBatch operands[kMaxSteps];  // of the steps that have one; strides of 0 broadcast
};

/*! \brief Runs `body(task, data)` for each task, on as many threads. */
struct Threads {
  int (*count)();
  void (*run)(int tasks, void (*body)(int task, void* data), void* data);
};

/*!
 * \brief Calculate the product, and use up its description. The strides of a and of b have a 1
 *        among the last two.
 */
void Multiply(const BlasLibrary& blas, Product* product, const Threads& threads);

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_MATMUL_H_
