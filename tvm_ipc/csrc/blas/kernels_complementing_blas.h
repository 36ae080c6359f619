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

/*! \brief Keys that are read at a time, and keys of a part, whose sums are added separately. */
constexpr int64_t kAttentionKeys = 64, kAttentionPart = 512;

/*!
 * \brief Attention of the queries of all heads that share a head of keys and values:
 *        softmax(cap(scale * queries keys^T) + bias) values.
 *
 * Row r is query r % queries of the head r / queries. Strides are in elements; the elements of a
 * query, key or value follow each other.
 */
struct Attention {
  FloatType type;  // of queries, keys and values; not float64
  FloatType bias_type, target_type;
  int64_t queries, keys, depth, value_depth;
  int64_t query_head, query_stride, key_stride, value_stride, target_head, target_stride;
  int64_t bias_head, bias_query, bias_key;  // bias_key is 0 or 1
  int64_t range_head, range_query;          // strides of AttentionHead::ranges
  float scale;
  float softcap;  // 0: none
  /*! \brief Query i sees the keys up to i + offset if `causal`, and at most the last `window` of
   *         these if `window` is not 0. */
  bool causal;
  int64_t offset, window;
  /*! \brief Whether a row must get the same bits for any number of queries. */
  bool reproducible;
};

/*!
 * \brief The keys of a block that the bias of a query does not exclude: the first one, and the one
 *        after the last one. `plain` means that it excludes none between these, and is 0 for them.
 */
struct BiasRange {
  uint8_t begin, end;
  bool plain;
};

struct AttentionHead {
  const char *queries, *keys, *values, *bias;  // bias may be nullptr
  char* target;
  /*! \brief A range for each block of kAttentionKeys keys, if there is a bias. */
  const BiasRange* ranges = nullptr;
};

/*!
 * \brief Attention of blocks of rows. A state has the sums of a block over some of the keys:
 *        StateSize floats. Scratch memory has ScratchSize floats. Both are aligned to 64 bytes.
 */
struct AttentionKernels {
  /*! \brief Rows that are computed together, and the most rows of a block, for which keys and
   *         values are packed once. */
  int64_t lanes, most_rows;
  /*! \brief Classify the bias of a query: one range for each block of keys. */
  void (*classify)(const Attention& a, const char* bias, BiasRange* ranges);
  /*!
   * \brief Compute the state of the rows [first, first + count) and the keys [begin, end). `begin`
   *        is a multiple of kAttentionPart.
   */
  void (*attend)(const Attention& a, const AttentionHead& head, int64_t first, int64_t count,
                 int64_t begin, int64_t end, float* scratch, float* state);
  /*! \brief Add the state of later keys to `state`. */
  void (*add)(const Attention& a, int64_t count, const float* later, float* state);
  /*! \brief Store the rows of the state of all keys. */
  void (*store)(const Attention& a, const AttentionHead& head, int64_t first, int64_t count,
                float* scratch, float* state);
  /*! \brief The most heads of keys of a call of `attend_groups`. */
  int64_t most_groups;
  /*! \brief The most rows of heads that `attend_groups` reads in the order of memory. */
  int64_t few_rows;
  /*!
   * \brief Compute the states of up to `lanes` rows, the keys [begin, end) and several heads of
   *        keys, which have a state of StateSize floats each. If heads of up to `few_rows` rows are
   *        side by side in memory, it is read in order. At last the keys of `next`, the first head
   *        of those that are needed afterwards, are prefetched, if it is not nullptr.
   */
  void (*attend_groups)(const Attention& a, const AttentionHead* heads, int64_t groups,
                        const AttentionHead* next, int64_t first, int64_t count, int64_t begin,
                        int64_t end, float* scratch, float* states);

  int64_t StateSize(const Attention& a, int64_t count) const {
    return (count + lanes - 1) / lanes * lanes * (a.value_depth + 2);
  }
  int64_t ScratchSize(const Attention& a, int64_t count) const {
    // Packed queries, keys and values, and a state of later keys.
    const int64_t packed = a.depth * most_rows + (a.depth + a.value_depth) * kAttentionKeys;
    return packed + StateSize(a, count);
  }
  /*! \brief Return the floats of the scratch memory of `attend_groups`, and of `store` after it. */
  int64_t GroupsScratchSize(const Attention& a, int64_t groups) const {
    const int64_t packed = a.depth * lanes * groups + (a.depth + a.value_depth) * kAttentionKeys;
    return packed + groups * StateSize(a, lanes);
  }
};

/*! \brief Steps of k of a packed block, and the distance of the rows of a packed block of a, which
 *         is no multiple of a large power of two: such rows would compete for a set of the cache.
 */
constexpr int64_t kPackedDepth = 256, kPackedStride = kPackedDepth + 16;
constexpr int kMaxPackedRows = 14;

/*!
 * \brief Where the next panel of b is read from. While a tile is computed, the cache lines at
 *        `from + p / 16 * group + p % 16 * step` and `second` bytes later are prefetched for each
 *        step p of k, unless `from` is nullptr.
 */
struct PackedAhead {
  const char* from;
  int64_t group, step, second;  // bytes
};

/*!
 * \brief Compute a tile: to = before + a b, for as many packed rows of a as the position in
 *        PackedKernels::tile, and PackedKernels::cols columns of b, whose lines are `ldb` elements
 *        apart. `before`, if not nullptr, has rows of PackedKernels::cols elements.
 */
using PackedTileFn = void (*)(const float* a, const float* b, int64_t ldb, int64_t k,
                              const PackedAhead& ahead, const float* before, float* to, int64_t ld);

/*!
 * \brief Widen `lines` lines of `length` elements, which are `stride` elements apart, and pad them
 *        with zeros to a multiple `width` of a vector: the elements of each line if they are stored
 *        as lines, the lines if they are transposed.
 */
using PackFn = void (*)(const char* from, int64_t stride, int64_t lines, int64_t length,
                        int64_t width, float* to, int64_t ld);

/*! \brief Matmuls of many rows (kernels_float32_packed.h). Absent, with rows == 0, from instruction
 *         sets for which the BLAS is as fast. */
struct PackedKernels {
  int rows;      // the most rows of a tile
  int64_t cols;  // of a panel
  /*! \brief The most rows for which `dot` is faster than packing weights contiguous along k. */
  int64_t dot_rows;
  PackFn lines[kFloat32 + 1], transposed[kFloat32 + 1];
  PackedTileFn tile[kMaxPackedRows + 1];  // indexed by the number of rows
};

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
  AttentionKernels attention;
  PackedKernels packed;
};

// ---- matmuls in a fixed order (fixed_order_matmul_avx2.cc)
// -----------------------------------------------------------

/*!
 * \brief The order of sums over k, which consists of `count`, a power of two, parts of `size`
 * steps.
 *
 * A part consists of groups of eight steps; zeros follow its last step. It has four lanes. Lane j
 * adds up the products of the steps 2j and 2j + 1 of each group, in this order, with fused
 * multiply-add, from +0 on. The sum of the part is (l0 + l2) + (l1 + l3). The sums of parts are
 * added as a balanced binary tree: ((p0 + p1) + (p2 + p3)) + ...
 */
struct Parts {
  int64_t count, size;
};
constexpr int64_t kFixedOrderLanes = 4, kFixedOrderGroup = 2 * kFixedOrderLanes;
/*! \brief Return the number of steps of a part with the zeros after them. */
inline int64_t PaddedSteps(int64_t size) {
  return (size + kFixedOrderGroup - 1) / kFixedOrderGroup * kFixedOrderGroup;
}
/*! \brief Return the number of steps of a lane of a part of `size` steps. */
inline int64_t StepsOfLane(int64_t size, int64_t lane) {
  const int64_t rest = size % kFixedOrderGroup - 2 * lane;
  return size / kFixedOrderGroup * 2 + (rest < 0 ? 0 : rest > 2 ? 2 : rest);
}
/*! \brief Columns that are packed together. */
constexpr int64_t kFixedOrderCols = 8;

/*! \brief Compute y[r][n] = sum over k of x[r][k] * weights[n][k] for up to `few_rows` rows. Zeros
 *         follow each part of x, and groups are in the order of `order_steps`. */
using FixedOrderFn = void (*)(const float* x, int64_t ldx, int64_t rows, Weights weights,
                              const Parts& parts, int64_t n, float* y, int64_t ldy);

/*! \brief Compute y[r][n] = sum over k of x[r][k] * weights[k][n]. `scratch` has kAlongNFloats
 *         elements for each lane and each level of the tree. */
using FixedOrderAlongNFn = void (*)(const float* x, int64_t ldx, Weights weights,
                                    const Parts& parts, int64_t n, float* y, int64_t ldy,
                                    float* scratch);
constexpr int64_t kAlongNFloats = 2048;

/*! \brief A block of a matmul of many rows: some parts of k. Both operands are float32. Rows of x
 *         are contiguous. */
struct FixedOrderBlock {
  const float* x;
  int64_t ldx, rows;
  /*! \brief See FixedOrderKernels::pack_along_k. */
  const float* weights;
  int64_t cols;
  Parts parts;           // of this block; their size is a multiple of kFixedOrderGroup
  int64_t index, count;  // of this block, and of those that cover k
  /*! \brief Lines of memory to prefetch meanwhile. */
  const char* next = nullptr;
  int64_t next_stride = 0, next_lines = 0, next_bytes = 0;
};

using PackFixedOrderFn = void (*)(const char* from, int64_t stride, int64_t steps, int64_t cols,
                                  float* to, int64_t tile);

/*!
 * \brief Kernels of one order of sums, for all instruction sets: the bits of a sum depend on its
 *        operands and on Parts.
 */
struct FixedOrderKernels {
  int64_t few_rows;
  FixedOrderFn few[kFloat32 + 1];  // indexed by the type of the weights
  /*!
   * \brief The same for weights[k][n]. Each part of a row of x has its lanes one after another: the
   *        steps 0, 1, 8, 9, ..., then 2, 3, 10, 11, ... Indexed by [type][rows - 1].
   */
  FixedOrderAlongNFn along_n[kFloat32 + 1][kSkinnyRows];
  /*!
   * \brief Pack weights in tiles of kFixedOrderCols columns, which are `tile` floats apart. A tile
   *        has eight vectors for each group: its even steps of the columns c and c + 4, for c = 0
   *        to 3, and then its odd steps. Zeros follow the last step, the last column or zeros take
   *        the place of columns after it. `stride` is that between columns, or between steps of
   *        weights[k][n].
   */
  PackFixedOrderFn pack_along_k[kFloat32 + 1], pack_along_n[kFloat32 + 1];
  /*! \brief Bring the even steps of each group of x before its odd ones. */
  void (*order_steps)(float* x, int64_t count);
  /*!
   * \brief Compute the sums of a block. Sums that wait for those of other blocks are in `levels`,
   *        which has level_size floats for each digit of block.count - 1. The last block stores to
   *        y.
   */
  void (*block)(const FixedOrderBlock& block, float* levels, float* y, int64_t ldy);
  int64_t (*level_size)(int64_t rows, int64_t cols);
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
extern const FixedOrderKernels kFixedOrderKernels;
extern const TileKernels kTileKernels;         // in tile registers
extern const TileKernels kPairKernels;         // in vectors
extern const DotFn kPairDot;                   // x and weights are bfloat16
extern const AttentionKernels kPairAttention;  // of bfloat16
extern const AttentionKernels kTileAttention;  // of bfloat16, in tile registers
#endif

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_COMPLEMENTING_BLAS_H_
