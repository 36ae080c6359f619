/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_axpy_along_n.h
 * \brief Matmuls of few rows with weights that are contiguous along n; part of
 * kernel_table_of_instruction_set.h.
 */
#ifndef TVM_IPC_BLAS_KERNELS_AXPY_ALONG_N_H_
#define TVM_IPC_BLAS_KERNELS_AXPY_ALONG_N_H_

#include "blas/kernels_dot_along_k.h"

namespace tvm_ipc {
namespace {

/*!
 * \brief Scale kDepth rows of weights and add them to y, which stays in the nearest cache and is
 *        loaded and stored once for all of these rows.
 */
template <FloatType type, int kRows, int kDepth, bool kFirst>
TVM_IPC_INLINE void AxpyBlock(const float* x, int64_t ldx, const char* w, int64_t stride,
                              int64_t pair_stride, int64_t n, float* y, int64_t ldy,
                              int64_t ahead) {
  constexpr int64_t kSize = Format<type>::kSize;
  Floats scale[kRows][kDepth];
  for (int r = 0; r < kRows; ++r) {
    for (int d = 0; d < kDepth; ++d) scale[r][d] = Splat(x[r * ldx + d]);
  }
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    Floats sums[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sums[r] = kFirst ? Floats{} : Format<kFloat32>::Load((const char*)(y + r * ldy + j));
    }
#pragma GCC unroll 8
    for (int d = 0; d < kDepth; ++d) {
      const char* p = w + d / 2 * pair_stride + d % 2 * stride + j * kSize;
      if (kDepth > 1) __builtin_prefetch(p + ahead, 0, 2);
      Floats weights = Format<type>::Load(p);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r] = Isa::Fma(scale[r][d], weights, sums[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) Format<kFloat32>::Store((char*)(y + r * ldy + j), sums[r]);
  }
  if (j < n) {
    for (int r = 0; r < kRows; ++r) {
      char* target = (char*)(y + r * ldy + j);
      Floats sum = kFirst ? Floats{} : LoadPart<kFloat32>(target, n - j);
      for (int d = 0; d < kDepth; ++d) {
        sum = Isa::Fma(scale[r][d],
                       LoadPart<type>(w + d / 2 * pair_stride + d % 2 * stride + j * kSize, n - j),
                       sum);
      }
      StorePart<kFloat32>(target, sum, n - j);
    }
  }
}

/*! \brief Add up k rows of weights, and prefetch those that are `ahead` bytes after each, or the
 * next ones if it is 0. The rows are pairs, which begin `pair_stride` bytes apart, or without gaps
 * if that is 0. */
template <FloatType type, int kRows>
TVM_IPC_INLINE void AxpyStretch(const float* x, int64_t ldx, const char* w, int64_t stride,
                                int64_t k, int64_t n, float* y, int64_t ldy, int64_t ahead = 0,
                                int64_t pair_stride = 0) {
  constexpr int kDepth = kRows == 1 ? 8 : 4;
  if (ahead == 0) ahead = kDepth * stride;
  if (pair_stride == 0) pair_stride = 2 * stride;
  auto row = [&](int64_t i) { return w + i / 2 * pair_stride + i % 2 * stride; };
  int64_t i = 0;
  if (k >= kDepth) {
    AxpyBlock<type, kRows, kDepth, true>(x, ldx, w, stride, pair_stride, n, y, ldy, ahead);
    for (i = kDepth; i + kDepth <= k; i += kDepth) {
      AxpyBlock<type, kRows, kDepth, false>(x + i, ldx, row(i), stride, pair_stride, n, y, ldy,
                                            ahead);
    }
  } else {
    AxpyBlock<type, kRows, 1, true>(x, ldx, w, stride, pair_stride, n, y, ldy, ahead);
    i = 1;
  }
  for (; i < k; ++i) {
    AxpyBlock<type, kRows, 1, false>(x + i, ldx, row(i), stride, pair_stride, n, y, ldy, ahead);
  }
}

template <FloatType type, int kRows>
void Axpy(const float* x, int64_t ldx, Weights weights, int64_t k, int64_t n, float* y,
          int64_t ldy) {
  // Columns per block, whose outputs stay in the nearest cache.
  constexpr int64_t kBlock = 4096 / kRows;
  alignas(Isa::kBytes) float more[kRows * kBlock];
  const int64_t stride = weights.ld * Format<type>::kSize;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    const char* w = weights.data + begin * Format<type>::kSize;
    float* target = y + begin;
    for (int64_t i = 0; i < k; i += kStretch) {
      const int64_t deep = k - i < kStretch ? k - i : kStretch;
      AxpyStretch<type, kRows>(x + i, ldx, w + i * stride, stride, deep, count,
                               i == 0 ? target : more, i == 0 ? ldy : kBlock);
      for (int r = 0; r < kRows && i > 0; ++r) {
        for (int64_t j = 0; j < count; ++j) target[r * ldy + j] += more[r * kBlock + j];
      }
    }
  }
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_AXPY_ALONG_N_H_
