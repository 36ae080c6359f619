/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernel_threads.h
 * \brief The threads of kernels on CPUs.
 */
#ifndef TVM_IPC_BLAS_KERNEL_THREADS_H_
#define TVM_IPC_BLAS_KERNEL_THREADS_H_

#include "blas/matmul_multi_thread.h"

namespace tvm_ipc {

/*! \brief The pool of the calling thread. */
extern const Threads kKernelThreads;

/*! \brief Return the most threads of a kernel, the one that calls it included: TVM's setting. */
int MaxKernelThreads();

/*! \brief Give TVM's kernels the same pool, in modules that are loaded from now on. */
void ReplaceThreadsOfTvm();

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNEL_THREADS_H_
