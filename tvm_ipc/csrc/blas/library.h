/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file library.h
 * \brief Function pointers to OpenBLAS of the wheel scipy-openblas64.
 *
 * The library is a private copy and runs each call on the calling thread. The caller splits the
 * work among the threads that TVM's kernels use too.
 */
#ifndef TVM_IPC_BLAS_LIBRARY_H_
#define TVM_IPC_BLAS_LIBRARY_H_

#include <cstdint>
#include <string>

namespace tvm_ipc {

/*! \brief CBLAS functions; enumerations are passed as integers. */
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

/*! \brief Return the library, or nullptr before LoadBlas. */
const BlasLibrary* LoadedBlas();

/*! \brief Load the library at `path`, once per process. Throws an Error with dlopen's message. */
const BlasLibrary& LoadBlas(const std::string& path);

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_LIBRARY_H_
