/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_table.h
 * \brief The table of functions that each instruction set provides.
 *
 * Does not include select_kernels_by_instruction_set.h: the translation units that are compiled for
 * one instruction set must hold no inline function of the standard library, because the linker
 * keeps one copy of such a function for all callers and may keep the one that not every machine can
 * run.
 */
#ifndef TVM_IPC_SHM_REDUCE_TABLE_H_
#define TVM_IPC_SHM_REDUCE_TABLE_H_

#include <cstddef>
#include <cstdint>

namespace tvm_ipc {

// The same alias as in select_kernels_by_instruction_set.h, which documents it.
using ReduceFn = void (*)(void* dst, const void* const* src, int num_src, size_t count,
                          bool stream);

/*! \brief The rows of a table. */
enum ReduceType : int {
  kReduceFloat16,
  kReduceBFloat16,
  kReduceFloat32,
  kReduceFloat64,
  kReduceInt8,
  kReduceUInt8,
  kReduceInt16,
  kReduceUInt16,
  kReduceInt32,
  kReduceUInt32,
  kReduceInt64,
  kReduceUInt64,
  kReduceBool,
  kNumReduceTypes
};
/*! \brief The columns of a table, one for each ReduceKind. */
constexpr int kReduceColumns = 9;

/*! \brief The parameters of a row's normalisation. `bias` is that of a LayerNorm, null for an
 *         RMSNorm. */
struct NormRow {
  size_t count;
  const float* weight;
  const float* bias;
  float epsilon;
};
using NormFn = void (*)(void* dst, const void* row, const NormRow& norm);
using WidenFn = void (*)(float* dst, const void* src, size_t count);

using NarrowFn = void (*)(void* dst, const float* src, size_t count);

/*! \brief The number of types that can be normalised; they are the first rows of a table. */
constexpr int kNumNormTypes = kReduceFloat32 + 1;
/*!
 * \brief Kernels for rows of one type: conversion to float32 and back, to nearest even, where a NaN
 *        stays the same NaN but becomes quiet; and normalisation, indexed by the result's type.
 */
struct NormKernels {
  WidenFn widen;
  NarrowFn narrow;
  NormFn to[kNumNormTypes];
};

/*! \brief Indexed by ReduceKind; nullptr if a kind has no meaning for the type. */
struct ReduceRow {
  ReduceFn kinds[kReduceColumns];
};

struct ReduceTable {
  const char* name;
  ReduceRow rows[kNumReduceTypes];
  void (*copy)(void* dst, const void* src, size_t bytes, bool stream);
  NormKernels norms[kNumNormTypes];
};

extern const ReduceTable kPortableTable;
#if defined(__x86_64__)
extern const ReduceTable kAvx2Table;
extern const ReduceTable kAvx512Table;
/*! \brief The row of kReduceBFloat16 for AVX-512 with BF16. */
extern const ReduceRow kAvx512BFloat16Row;
#endif

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_REDUCE_TABLE_H_
