/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_complementing_blas.h
 * \brief Kernels that complement the BLAS, for each instruction set: conversion of 16-bit floats,
 *        epilogues, and matmuls of few rows.
 *
 * Like reduce_table.h, this header uses no inline function of the standard library: the linker
 * keeps one copy of such a function for all callers, possibly one that not every machine can run.
 */
#ifndef TVM_IPC_BLAS_KERNELS_COMPLEMENTING_BLAS_H_
#define TVM_IPC_BLAS_KERNELS_COMPLEMENTING_BLAS_H_

#include <cstddef>
#include <cstdint>

namespace tvm_ipc {

enum FloatType : int { kFloat16, kBFloat16, kFloat32, kFloat64, kNumFloatTypes };

/*! \brief The kind of an epilogue step; the values are those of `Epilogue` in Python. */
enum StepKind : int {
  kStepAdd = 1,
  kStepMultiply = 2,
  kStepRelu = 3,
  kStepGelu = 4,
  kStepGeluTanh = 5,
  kStepSilu = 6,
};

/*!
 * \brief An epilogue step and its operand, which only kStepAdd and kStepMultiply have. Element
 *        (i, j) of the operand is at `i * row_stride + j * col_stride`; col_stride is 0 or 1.
 */
struct Step {
  int kind;
  FloatType type;
  const char* operand;
  int64_t row_stride;
  int64_t col_stride;
};

/*! \brief The most rows per call of a few-row kernel. */
constexpr int kSkinnyRows = 4;

/*! \brief Weights in rows that are `ld` elements apart. */
struct Weights {
  const char* data;
  int64_t ld;
};

/*!
 * \brief Compute y[r][n] = sum over k of x[r][k] * weights[k][n]. x and y are float32, with rows
 *        that are ldx and ldy elements apart.
 */
using SkinnyFn = void (*)(const float* x, int64_t ldx, Weights weights, int64_t k, int64_t n,
                          float* y, int64_t ldy);

/*!
 * \brief Compute y[r][n] = sum over k of x[r][k] * weights[n][k], for any number of rows. x is
 *        contiguous along k; BlasKernels::dot and kPairDot specify its type.
 */
using DotFn = void (*)(const char* x, int64_t ldx, int64_t rows, Weights weights, int64_t k,
                       int64_t n, float* y, int64_t ldy);

struct BlasKernels {
  const char* name;
  /*! \brief Convert `count` elements to float32. Indexed by FloatType, up to kFloat32. */
  void (*widen[kFloat32 + 1])(float* to, const char* from, int64_t count);
  /*! \brief Kernels for weights that are contiguous along n. Indexed by [type][rows - 1]. */
  SkinnyFn skinny[kFloat32 + 1][kSkinnyRows];
  /*! \brief Kernels for weights that are contiguous along k; x is float32. Indexed by [type]. */
  DotFn dot[kFloat32 + 1];
  /*!
   * \brief Apply the steps to `rows` x `cols` sums and store the results. `target` may be the
   *        memory of the sums if it is float32.
   */
  void (*finish)(const float* sums, int64_t ld_sums, int64_t rows, int64_t cols, const Step* steps,
                 int num_steps, char* target, FloatType type, int64_t ld_target);
};

// ---- bfloat16 matmuls (bf16_matmul_amx.cc, bf16_matmul_avx512bf16.cc)
// --------------------------------

constexpr int64_t kTileStep = 32;  // elements of k
constexpr int64_t kTileEdge = 32;  // rows of a block, columns of a panel

/*! \brief A matrix of bfloat16, one of whose strides is 1. */
struct TileMatrix {
  const char* data;
  int64_t row_stride;
  int64_t col_stride;
};

/*!
 * \brief Packing functions and micro-kernel of one instruction set.
 *
 * A packed operand has its number of rows or columns, rounded up to kTileEdge, times k, rounded up
 * to kTileStep, elements. It is aligned to 64 bytes.
 */
struct TileKernels {
  const char* name;
  /*! \brief The most rows for which kPairDot is faster than packing weights contiguous along k. */
  int64_t rows_in_place;
  /*! \brief Call before the first `block` on a thread, and `end` after the last one. */
  void (*begin)();
  void (*pack_a)(const TileMatrix& a, int64_t row, int64_t rows, int64_t k, char* to);
  void (*pack_b)(const TileMatrix& b, int64_t col, int64_t cols, int64_t k, char* to);
  /*! \brief Compute kTileEdge x kTileEdge float32 sums; only the first half of the rows unless
   *         `two_rows`. */
  void (*block)(const char* a, const char* b, int64_t steps, bool two_rows, float* sums,
                int64_t ld);
  void (*end)();
};

extern const BlasKernels kPortableBlas;
#if defined(__x86_64__)
extern const BlasKernels kAvx2Blas;
extern const BlasKernels kAvx512Blas;
extern const TileKernels kTileKernels;  // in tile registers
extern const TileKernels kPairKernels;  // in vectors
extern const DotFn kPairDot;            // x and weights are bfloat16
#endif

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_COMPLEMENTING_BLAS_H_
