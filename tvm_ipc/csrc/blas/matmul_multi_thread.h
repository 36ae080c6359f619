/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file matmul_multi_thread.h
 * \brief Multi-threaded, batched matmuls with epilogues.
 *
 *   target[batch] = steps(a[batch] b[batch])
 *
 * Operands are read in place, through strides. 16-bit floats may be widened or packed block by
 * block, in a cache. Sums and steps are computed in float32 (in float64 for float64 operands) and
 * rounded once, when they are stored. The work is split along batches, rows or columns, never along
 * the K dimension, and steps are elementwise.
 */
#ifndef TVM_IPC_BLAS_MATMUL_MULTI_THREAD_H_
#define TVM_IPC_BLAS_MATMUL_MULTI_THREAD_H_

#include <cstdint>

#include "blas/kernels_complementing_blas.h"
#include "blas/library.h"
#include "blas/run_matmul_piece.h"

namespace tvm_ipc {

constexpr int kMaxBatchDims = 6;

/*! \brief A batch of matrices; all strides are in elements. */
struct MatrixBatch {
  const char* data;
  int64_t row_stride;
  int64_t col_stride;
  int64_t batch[kMaxBatchDims];  // strides, one per batch dimension of the product
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
  /*! \brief 0: sums are added up in the fastest order. Else Parts::count, so that the bits of a sum
   *         depend on its operands and this number only; needs OrdersSums and no float64. */
  int64_t parts;
  MatrixBatch operands[kMaxSteps];  // of the steps that have one; strides of 0 broadcast
};

/*! \brief Thread pool: `run` calls `body(task, data)` for each task, on up to `threads` threads. */
struct Threads {
  int (*count)();
  void (*run)(int threads, int tasks, void (*body)(int task, void* data), void* data);
};

/*! \brief Call `job->RunUnit(unit)` for each unit, on up to `used` threads. */
template <typename Job>
void RunUnits(const Threads& threads, int used, int64_t units, Job* job) {
  if (used <= 1) {
    for (int64_t unit = 0; unit < units; ++unit) job->RunUnit(unit);
    return;
  }
  threads.run(
      used, static_cast<int>(units),
      [](int unit, void* data) { static_cast<Job*>(data)->RunUnit(unit); }, job);
}

/*!
 * \brief Compute the product. Modifies `*product`. One of row_stride and col_stride of a must be 1,
 *        and likewise of b.
 */
void Multiply(const BlasLibrary& blas, Product* product, const Threads& threads);

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_MATMUL_MULTI_THREAD_H_
