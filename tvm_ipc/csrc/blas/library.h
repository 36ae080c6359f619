/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file library.h
 * \brief OpenBLAS of the wheel scipy-openblas64, by function pointers.
 *
 * The library is a private copy of ours, and does all its work on the thread that calls it: who
 * calls it divides the work among the threads that TVM's kernels have too.
 */
#ifndef TVM_IPC_BLAS_LIBRARY_H_
#define TVM_IPC_BLAS_LIBRARY_H_

#include <cstdint>
#include <string>

namespace tvm_ipc {

/*! \brief CBLAS, its enumerations as the numbers they are. */
struct BlasLibrary {
  static constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;
  template <typename T>
  using Gemm = void (*)(int order, int transpose_a, int transpose_b, int64_t m, int64_t n,
                        int64_t k, T alpha, const T* a, int64_t lda, const T* b, int64_t ldb,
                        T beta, T* c, int64_t ldc);
  template <typename T>
  using Gemv = void (*)(int order, int transpose, int64_t m, int64_t n, T alpha, const T* a,
                        int64_t lda, const T* x, int64_t incx, T beta, T* y, int64_t incy);
  Gemm<float> sgemm;
  Gemm<double> dgemm;
  Gemv<double> dgemv;
  std::string config;
};

/*! \brief The library, or nullptr before LoadBlas. */
const BlasLibrary* LoadedBlas();

/*! \brief Load the library at `path`, once per process. Throws what the loader says. */
const BlasLibrary& LoadBlas(const std::string& path);

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_LIBRARY_H_
