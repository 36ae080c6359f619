/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_float32_packed.h
 * \brief Matmuls of many rows in float32, whose operands are packed block by block; part of
 *        kernel_table_of_instruction_set.h for instruction sets with wide vectors.
 *
 * A tile of sums has up to kTileRowsPacked rows and two vectors of columns, which stay in registers
 * for kPackedDepth steps of k. Each step loads two vectors of b and multiplies them by one element
 * of each row of a:
 *
 *      packed a: rows of kPackedDepth elements, kPackedStride elements apart
 *      packed b: a panel of two vectors of columns; one line per step of k
 *
 * Each output is the sum of the sums of kPackedDepth steps, each of which is added up in the order
 * of k. So its bits do not depend on the position of the output in a tile, panel or piece, nor on
 * the number of rows and columns, nor on the instruction set. kernels_axpy_along_n.h sums up in the
 * same order, kernels_dot_along_k.h does not.
 */
#ifndef TVM_IPC_BLAS_KERNELS_FLOAT32_PACKED_H_
#define TVM_IPC_BLAS_KERNELS_FLOAT32_PACKED_H_

#include "blas/kernels_dot_along_k.h"

namespace tvm_ipc {
namespace {

/*! \brief Rows of a tile: as many as there are registers for. AVX-512 has 32 registers. */
constexpr int kTileRowsPacked = kLanes >= 16 ? 14 : 6;
constexpr int64_t kPanelWidth = 2 * kLanes;
/*! \brief Rows of PackedKernels::dot_rows. Pieces of matmuls whose rows are split have 32. */
constexpr int64_t kDotRowsPacked = kLanes >= 16 ? 31 : 16;
/*! \brief Floats of a cache line. */
constexpr int64_t kLineFloats = 16;

static_assert(kPackedDepth == kStretch, "so that the sums of Axpy have the same order");
static_assert(kTileRowsPacked <= kMaxPackedRows, "the table of tiles has a kernel per row count");

template <int kRows>
void PackedTile(const float* a, const float* b, int64_t ldb, int64_t k, const PackedAhead& ahead,
                const float* before, float* to, int64_t ld) {
  Floats left[kRows], right[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    left[r] = right[r] = Floats{};
    __builtin_prefetch(to + r * ld, 1, 3);
    __builtin_prefetch(to + r * ld + kLanes, 1, 3);
  }
  const float* next_a = a + kRows * kPackedStride;
  const char* group = ahead.from;
  for (int64_t p = 0; p < k; p += kLineFloats, next_a += kLineFloats) {
    const int64_t count = k - p < kLineFloats ? k - p : kLineFloats;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(next_a + r * kPackedStride, 0, 3);
    if (group != nullptr) {
      const char* line = group;
      for (int64_t i = 0; i < kLineFloats; ++i, line += ahead.step) {
        __builtin_prefetch(line, 0, 2);
        __builtin_prefetch(line + ahead.second, 0, 2);
      }
      group += ahead.group;
    }
    // Fewer instructions per multiplication help where another program shares the core.
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; ++i, ++a, b += ldb) {
      const Floats of_left = Format<kFloat32>::Load((const char*)b);
      const Floats of_right = Format<kFloat32>::Load((const char*)(b + kLanes));
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Floats of_a = Splat(a[r * kPackedStride]);
        left[r] += of_a * of_left;
        right[r] += of_a * of_right;
      }
    }
  }
  if (before != nullptr) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const char* sums = (const char*)(before + r * kPanelWidth);
      left[r] += Format<kFloat32>::Load(sums);
      right[r] += Format<kFloat32>::Load(sums + sizeof(Floats));
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    char* sums = (char*)(to + r * ld);
    Format<kFloat32>::Store(sums, left[r]);
    Format<kFloat32>::Store(sums + sizeof(Floats), right[r]);
  }
}

template <FloatType type>
TVM_IPC_INLINE Floats LoadUpTo(const char* p, int64_t count) {
  if (count >= kLanes) return Format<type>::Load(p);
  return count > 0 ? LoadPart<type>(p, count) : Floats{};
}

template <FloatType type>
void PackLines(const char* from, int64_t stride, int64_t lines, int64_t length, int64_t width,
               float* to, int64_t ld) {
  constexpr int64_t kSize = Format<type>::kSize;
  for (int64_t line = 0; line < lines; ++line) {
    const char* source = from + line * stride * kSize;
    char* target = (char*)(to + line * ld);
    for (int64_t i = 0; i < width; i += kLanes) {
      Format<kFloat32>::Store(target + i * 4, LoadUpTo<type>(source + i * kSize, length - i));
    }
  }
}

/*! \brief Widen and transpose kLanes lines of kLanes elements. */
template <FloatType type>
TVM_IPC_INLINE void TransposeBlock(const char* from, int64_t stride, float* to, int64_t ld) {
  Floats block[kLanes];
  if constexpr (type == kFloat32) {
    Isa::LoadTransposed(block, from, stride);
  } else {
#pragma GCC unroll 16
    for (int64_t q = 0; q < kLanes; ++q) block[q] = Format<type>::Load(from + q * stride);
    Isa::Transpose(block);
  }
#pragma GCC unroll 16
  for (int64_t q = 0; q < kLanes; ++q) {
    Format<kFloat32>::Store((char*)(to + q * ld), block[q]);
  }
}

/*! \brief The same for up to kLanes lines and elements; zeros take the place of other lines. */
template <FloatType type>
TVM_IPC_INLINE void TransposePart(const char* from, int64_t stride, int64_t lines, int64_t count,
                                  float* to, int64_t ld) {
  Floats block[kLanes];
  for (int64_t q = 0; q < kLanes; ++q) {
    block[q] = q < lines ? LoadUpTo<type>(from + q * stride, count) : Floats{};
  }
  Isa::Transpose(block);
  for (int64_t q = 0; q < count; ++q) {
    Format<kFloat32>::Store((char*)(to + q * ld), block[q]);
  }
}

template <FloatType type>
void PackTransposed(const char* from, int64_t stride, int64_t lines, int64_t length, int64_t width,
                    float* to, int64_t ld) {
  constexpr int64_t kSize = Format<type>::kSize;
  for (int64_t line = 0; line < width; line += kLanes) {
    const char* source = from + line * stride * kSize;
    float* target = to + line;
    int64_t i = 0;
    if (line + kLanes <= lines) {
      for (; i + kLanes <= length; i += kLanes) {
        TransposeBlock<type>(source + i * kSize, stride * kSize, target + i * ld, ld);
      }
    }
    for (; i < length; i += kLanes) {
      const int64_t count = length - i < kLanes ? length - i : kLanes;
      TransposePart<type>(source + i * kSize, stride * kSize, lines - line, count, target + i * ld,
                          ld);
    }
  }
}

template <int kRows>
constexpr void AddPackedTiles(PackedKernels* kernels) {
  kernels->tile[kRows] = PackedTile<kRows>;
  if constexpr (kRows > 1) AddPackedTiles<kRows - 1>(kernels);
}

constexpr PackedKernels MakePackedKernels() {
  PackedKernels kernels{
      kTileRowsPacked,
      kPanelWidth,
      kDotRowsPacked,
      {PackLines<kFloat16>, PackLines<kBFloat16>, PackLines<kFloat32>},
      {PackTransposed<kFloat16>, PackTransposed<kBFloat16>, PackTransposed<kFloat32>},
      {}};
  AddPackedTiles<kTileRowsPacked>(&kernels);
  return kernels;
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_FLOAT32_PACKED_H_
