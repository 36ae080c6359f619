/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels.h
 * \brief What each instruction set provides beside a BLAS: conversion of 16-bit floats,
 *        epilogues, and products of few rows.
 *
 * Like reduce_table.h it holds no inline function of the standard library: the linker keeps one
 * copy of such a function for all callers and may keep one that not every machine can run.
 */
#ifndef TVM_IPC_BLAS_KERNELS_H_
#define TVM_IPC_BLAS_KERNELS_H_

#include <cstddef>
#include <cstdint>

namespace tvm_ipc {

enum FloatType : int { kFloat16, kBFloat16, kFloat32, kFloat64, kNumFloatTypes };

/*! \brief One step after a product; the numbers are those of contract.Epilogue. */
enum StepKind : int {
  kStepAdd = 1,
  kStepMultiply = 2,
  kStepRelu = 3,
  kStepGelu = 4,
  kStepGeluTanh = 5,
  kStepSilu = 6,
};

/*!
 * \brief A step, and the operand of the first two. Element (i, j) of the operand is at
 *        `i * row_stride + j * col_stride`; col_stride is 0 or 1.
 */
struct Step {
  int kind;
  FloatType type;
  const char* operand;
  int64_t row_stride;
  int64_t col_stride;
};

/*! \brief The most rows of one call of a kernel for few rows. */
constexpr int kSkinnyRows = 4;

/*! \brief Weights in rows of `ld` elements. */
struct Weights {
  const char* data;
  int64_t ld;
};

/*! \brief y[r][n] = sum over k of x[r][k] * weights[k][n]; x and y are float32 rows of ldx, ldy. */
using SkinnyFn = void (*)(const float* x, int64_t ldx, Weights weights, int64_t k, int64_t n,
                          float* y, int64_t ldy);

/*!
 * \brief y[r][n] = sum over k of x[r][k] * weights[n][k], for any number of rows. Elements of x lie
 *        together along k, and are what the table says that has the function.
 */
using DotFn = void (*)(const char* x, int64_t ldx, int64_t rows, Weights weights, int64_t k,
                       int64_t n, float* y, int64_t ldy);

struct BlasKernels {
  const char* name;
  /*! \brief float32 of `count` elements. By FloatType, up to kFloat32. */
  void (*widen[kFloat32 + 1])(float* to, const char* from, int64_t count);
  /*! \brief Weights in rows along n. [type][rows - 1] */
  SkinnyFn skinny[kFloat32 + 1][kSkinnyRows];
  /*! \brief Weights in rows along k; x is float32. [type] */
  DotFn dot[kFloat32 + 1];
  /*!
   * \brief Take `rows` x `cols` sums through the steps and store them. The target may be the
   *        sums' own memory if it is float32.
   */
  void (*finish)(const float* sums, int64_t ld_sums, int64_t rows, int64_t cols, const Step* steps,
                 int num_steps, char* target, FloatType type, int64_t ld_target);
};

// ---- products of bfloat16 (kernels_tiles.cc, kernels_avx512bf16.cc) ----------------------------

constexpr int64_t kTileStep = 32;  // elements of k
constexpr int64_t kTileEdge = 32;  // rows of a block, columns of a panel

/*! \brief A matrix of bfloat16, one of whose strides is 1. */
struct TileMatrix {
  const char* data;
  int64_t row_stride;
  int64_t col_stride;
};

/*!
 * \brief Packed operands take their rows or columns, rounded up to kTileEdge, times k, rounded up
 *        to kTileStep, aligned to 64 bytes.
 */
struct TileKernels {
  const char* name;
  /*! \brief Up to so many rows kPairDot is faster than packing, where weights lie along k. */
  int64_t rows_in_place;
  /*! \brief Before the first and after the last call of `block` on a thread. */
  void (*begin)();
  void (*pack_a)(const TileMatrix& a, int64_t row, int64_t rows, int64_t k, char* to);
  void (*pack_b)(const TileMatrix& b, int64_t col, int64_t cols, int64_t k, char* to);
  /*! \brief kTileEdge x kTileEdge sums of float32; only the first half of the rows unless
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
extern const DotFn kPairDot;            // x is bfloat16, and so are weights
#endif

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_H_
