/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file attention_multi_thread.h
 * \brief Multi-threaded attention of batches of heads.
 *
 * Threads take blocks of rows one after another, so that a delayed thread delays one block. If
 * there are too few rows, as for a decoder's next token, the keys are split as well. The parts are
 * the same for any number of threads, and so are the bits of results.
 */
#ifndef TVM_IPC_BLAS_ATTENTION_MULTI_THREAD_H_
#define TVM_IPC_BLAS_ATTENTION_MULTI_THREAD_H_

#include <cstdint>

#include "blas/kernels_complementing_blas.h"
#include "blas/matmul_multi_thread.h"

namespace tvm_ipc {

/*! \brief Strides, in elements, of the batch and of the head of keys and values. */
struct AttentionStrides {
  int64_t batch, group;
};

/*! \brief `batches` times `groups` heads of keys and values; each serves `heads` heads of queries.
 */
struct AttentionBatch {
  Attention each;
  int64_t batches, groups, heads;
  AttentionHead first;
  AttentionStrides queries, keys, values, bias, target;
  /*! \brief Set by `Attend`, like `first.ranges`. */
  AttentionStrides ranges;
};

void Attend(const AttentionBatch& batch, const Threads& threads);

/*! \brief Return the number of threads that a number of multiplications is worth. */
int AttentionTasks(double multiplications, const Threads& threads);

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_ATTENTION_MULTI_THREAD_H_
