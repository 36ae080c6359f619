/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_impl.h
 * \brief The kernels of kernels.h for one instruction set.
 *
 * Included by a translation unit that defines `Isa` first:
 *   kBytes, kLanes                   of a vector of float32
 *   Raw16                            kLanes elements of 16 bits
 *   Load16, Load16Part               of memory; the second one so many, and zeros
 *   Store16, Store16Part             to memory; the second one only so many
 *   Load32Part, Store32Part          the same of float32
 *   WidenHalf, NarrowHalf            float16 to float32 and, to nearest even, back
 *   WidenBrain, Lower                bfloat16 to float32; the lower halves of words
 *   Sum                              of the lanes
 */
#ifndef TVM_IPC_BLAS_KERNELS_IMPL_H_
#define TVM_IPC_BLAS_KERNELS_IMPL_H_

#include "blas/kernels.h"

#define TVM_IPC_INLINE inline __attribute__((always_inline))

namespace tvm_ipc {
namespace {

typedef float Floats __attribute__((vector_size(Isa::kBytes)));
typedef uint32_t Words __attribute__((vector_size(Isa::kBytes)));
typedef int32_t Ints __attribute__((vector_size(Isa::kBytes)));
constexpr int64_t kLanes = Isa::kLanes;

TVM_IPC_INLINE Floats Splat(float x) { return x - (Floats){}; }

/*! \brief How a type of elements is read and written as float32. */
template <FloatType type>
struct Format;

template <>
struct Format<kFloat32> {
  static constexpr int64_t kSize = 4;
  static TVM_IPC_INLINE Floats Load(const char* p) {
    Floats v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
  static TVM_IPC_INLINE void Store(char* p, Floats v) { __builtin_memcpy(p, &v, sizeof(v)); }
  static TVM_IPC_INLINE Floats LoadPart(const char* p, int64_t count) {
    return Isa::Load32Part(p, count);
  }
  static TVM_IPC_INLINE void StorePart(char* p, Floats v, int64_t count) {
    Isa::Store32Part(p, v, count);
  }
};

/*! \brief Of 16 bits: the loads and stores are the same for both. */
template <typename Conversion>
struct Format16 {
  static constexpr int64_t kSize = 2;
  static TVM_IPC_INLINE Floats Load(const char* p) { return Conversion::Widen(Isa::Load16(p)); }
  static TVM_IPC_INLINE void Store(char* p, Floats v) { Isa::Store16(p, Conversion::Narrow(v)); }
  static TVM_IPC_INLINE Floats LoadPart(const char* p, int64_t count) {
    return Conversion::Widen(Isa::Load16Part(p, count));
  }
  static TVM_IPC_INLINE void StorePart(char* p, Floats v, int64_t count) {
    Isa::Store16Part(p, Conversion::Narrow(v), count);
  }
};

struct HalfConversion {
  static TVM_IPC_INLINE Floats Widen(Isa::Raw16 raw) { return Isa::WidenHalf(raw); }
  static TVM_IPC_INLINE Isa::Raw16 Narrow(Floats v) { return Isa::NarrowHalf(v); }
};

struct BrainConversion {
  static TVM_IPC_INLINE Floats Widen(Isa::Raw16 raw) { return Isa::WidenBrain(raw); }
  static TVM_IPC_INLINE Isa::Raw16 Narrow(Floats v) {
    Words bits = (Words)v;
    // To nearest even; a NaN is made quiet instead, or the carry could make it infinite.
    Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    Words quiet = (bits >> 16) | 0x40u;
    Words number = (Words)(v == v);
    return Isa::Lower((rounded & number) | (quiet & ~number));
  }
};

template <>
struct Format<kFloat16> : Format16<HalfConversion> {};
template <>
struct Format<kBFloat16> : Format16<BrainConversion> {};

template <FloatType type>
TVM_IPC_INLINE Floats LoadPart(const char* p, int64_t count) {
  return Format<type>::LoadPart(p, count);
}

template <FloatType type>
TVM_IPC_INLINE void StorePart(char* p, Floats v, int64_t count) {
  Format<type>::StorePart(p, v, count);
}

template <FloatType type>
void Widen(float* to, const char* from, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Format<kFloat32>::Store((char*)(to + i), Format<type>::Load(from + i * Format<type>::kSize));
  }
  if (i < count) {
    StorePart<kFloat32>((char*)(to + i), LoadPart<type>(from + i * Format<type>::kSize, count - i),
                        count - i);
  }
}

// ---- products of few rows ------------------------------------------------------------------

/*!
 * \brief So many products are added one after the other; the sums of such stretches are added then.
 *        The rounding errors of a sum grow with the number of its terms.
 */
constexpr int64_t kStretch = 256;

/*!
 * \brief Weights in rows along k: each output is a dot product. Some outputs at a time share
 *        the loads of x, all rows of x share the load and the widening of a weight.
 */
template <FloatType type, int kRows, int kCols>
TVM_IPC_INLINE void DotStretch(const float* x, int64_t ldx, const char* w, int64_t stride,
                               int64_t k, float* y, int64_t ldy) {
  constexpr int64_t kSize = Format<type>::kSize;
  Floats sums[kRows][kCols] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    Floats weights[kCols];
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) {
      const char* p = w + c * stride + i * kSize;
      if (kCols > 1) __builtin_prefetch(p + kCols * stride, 0, 2);
      weights[c] = Format<type>::Load(p);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Floats value = Format<kFloat32>::Load((const char*)(x + r * ldx + i));
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) sums[r][c] += value * weights[c];
    }
  }
  if (i < k) {
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) {
      Floats weights = LoadPart<type>(w + c * stride + i * kSize, k - i);
      for (int r = 0; r < kRows; ++r) {
        sums[r][c] += LoadPart<kFloat32>((const char*)(x + r * ldx + i), k - i) * weights;
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) y[r * ldy + c] = Isa::Sum(sums[r][c]);
  }
}

template <FloatType type, int kRows, int kCols>
TVM_IPC_INLINE void DotBlock(const float* x, int64_t ldx, const char* w, int64_t stride, int64_t k,
                             float* y, int64_t ldy) {
  constexpr int64_t kDeep = kStretch * kLanes;
  float more[kRows * kCols];
  for (int64_t i = 0; i < k; i += kDeep) {
    DotStretch<type, kRows, kCols>(x + i, ldx, w + i * Format<type>::kSize, stride,
                                   k - i < kDeep ? k - i : kDeep, i == 0 ? y : more,
                                   i == 0 ? ldy : kCols);
    if (i == 0) continue;
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kCols; ++c) y[r * ldy + c] += more[r * kCols + c];
    }
  }
}

template <FloatType type, int kRows>
void Dot(const float* x, int64_t ldx, Weights weights, int64_t k, int64_t n, float* y,
         int64_t ldy) {
  constexpr int kCols = kRows == 1 ? 8 : 4;
  const int64_t stride = weights.ld * Format<type>::kSize;
  int64_t j = 0;
  for (; j + kCols <= n; j += kCols) {
    DotBlock<type, kRows, kCols>(x, ldx, weights.data + j * stride, stride, k, y + j, ldy);
  }
  for (; j < n; ++j) {
    DotBlock<type, kRows, 1>(x, ldx, weights.data + j * stride, stride, k, y + j, ldy);
  }
}

/*!
 * \brief Weights in rows along n: rows of weights are scaled and added. Several of them at once,
 *        so that y, which stays in the nearest cache, is loaded and stored once for all of them.
 */
template <FloatType type, int kRows, int kDepth, bool kFirst>
TVM_IPC_INLINE void AxpyBlock(const float* x, int64_t ldx, const char* w, int64_t stride, int64_t n,
                              float* y, int64_t ldy) {
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
      const char* p = w + d * stride + j * kSize;
      if (kDepth > 1) __builtin_prefetch(p + kDepth * stride, 0, 2);
      Floats weights = Format<type>::Load(p);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r] += scale[r][d] * weights;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) Format<kFloat32>::Store((char*)(y + r * ldy + j), sums[r]);
  }
  if (j < n) {
    for (int r = 0; r < kRows; ++r) {
      char* target = (char*)(y + r * ldy + j);
      Floats sum = kFirst ? Floats{} : LoadPart<kFloat32>(target, n - j);
      for (int d = 0; d < kDepth; ++d) {
        sum += scale[r][d] * LoadPart<type>(w + d * stride + j * kSize, n - j);
      }
      StorePart<kFloat32>(target, sum, n - j);
    }
  }
}

template <FloatType type, int kRows>
TVM_IPC_INLINE void AxpyStretch(const float* x, int64_t ldx, const char* w, int64_t stride,
                                int64_t k, int64_t n, float* y, int64_t ldy) {
  constexpr int kDepth = kRows == 1 ? 8 : 4;
  int64_t i = 0;
  if (k >= kDepth) {
    AxpyBlock<type, kRows, kDepth, true>(x, ldx, w, stride, n, y, ldy);
    for (i = kDepth; i + kDepth <= k; i += kDepth) {
      AxpyBlock<type, kRows, kDepth, false>(x + i, ldx, w + i * stride, stride, n, y, ldy);
    }
  } else {
    AxpyBlock<type, kRows, 1, true>(x, ldx, w, stride, n, y, ldy);
    i = 1;
  }
  for (; i < k; ++i) {
    AxpyBlock<type, kRows, 1, false>(x + i, ldx, w + i * stride, stride, n, y, ldy);
  }
}

template <FloatType type, int kRows>
void Axpy(const float* x, int64_t ldx, Weights weights, int64_t k, int64_t n, float* y,
          int64_t ldy) {
  // The outputs of one block stay in the nearest cache.
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

// ---- epilogues -----------------------------------------------------------------------------

/*! \brief e to the x, with a relative error of 2e-7; 0 and infinity where they are nearest. */
TVM_IPC_INLINE Floats Exp(Floats x) {
  const Floats low = Splat(-87.5f), high = Splat(89.0f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  // Adding this rounds to an integer, which then is in the low bits.
  const Floats magic = Splat(12582912.0f);
  Floats shifted = x * 1.44269504088896341f + magic;
  Floats count = shifted - magic;
  // ln 2 in two parts: the first has trailing zeros, so its products are exact.
  Floats rest = x - count * 0.693359375f + count * 2.12194440e-4f;
  // Taylor's series up to the seventh power; |rest| is at most ln 2 / 2.
  Floats sum = rest * (1.0f / 5040) + (1.0f / 720);
  sum = sum * rest + (1.0f / 120);
  sum = sum * rest + (1.0f / 24);
  sum = sum * rest + (1.0f / 6);
  sum = sum * rest + 0.5f;
  sum = sum * rest + 1.0f;
  sum = sum * rest + 1.0f;
  Words exponent = ((Words)shifted - (Words)magic + 127u) << 23;
  return sum * (Floats)exponent;
}

TVM_IPC_INLINE Floats Silu(Floats x) { return x / (1.0f + Exp(-x)); }

/*!
 * \brief x * (1 + erf(x / sqrt 2)) / 2, the error function by formula 7.1.26 of Abramowitz and
 *        Stegun, whose error is 1.5e-7.
 */
TVM_IPC_INLINE Floats Gelu(Floats x) {
  Floats size = (Floats)((Words)x & 0x7fffffffu) * 0.70710678118654752f;
  Floats t = 1.0f / (1.0f + 0.3275911f * size);
  Floats sum = t * 1.061405429f - 1.453152027f;
  sum = sum * t + 1.421413741f;
  sum = sum * t - 0.284496736f;
  sum = sum * t + 0.254829592f;
  // 1 - erf(size); of a negative x that is 1 + erf itself, with no cancellation.
  Floats rest = sum * t * Exp(-(size * size));
  Floats zero = {};
  return 0.5f * x * (x < zero ? rest : 2.0f - rest);
}

/*! \brief x * (1 + tanh(u)) / 2 = x * sigmoid(2 u). */
TVM_IPC_INLINE Floats GeluTanh(Floats x) {
  Floats u = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return x / (1.0f + Exp(-2.0f * u));
}

TVM_IPC_INLINE Floats Relu(Floats x) {
  Floats zero = {};
  return x > zero ? x : zero;  // of a NaN, too, as TVM's kernels have it
}

constexpr int64_t kChunk = 256;

template <typename Function>
TVM_IPC_INLINE void Map(float* values, int64_t vectors, Function function) {
  for (int64_t i = 0; i < vectors; ++i) {
    char* p = (char*)(values + i * kLanes);
    Format<kFloat32>::Store(p, function(Format<kFloat32>::Load(p)));
  }
}

template <FloatType type, bool kProduct>
void Combine(float* values, const Step& step, int64_t row, int64_t col, int64_t count) {
  constexpr int64_t kSize = Format<type>::kSize;
  const char* p = step.operand + (row * step.row_stride + col * step.col_stride) * kSize;
  const int64_t whole = count / kLanes * kLanes;
  Floats operand = {};
  if (step.col_stride == 0) {
    float scalar;
    Widen<type>(&scalar, p, 1);
    operand = Splat(scalar);
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    if (step.col_stride != 0) {
      operand =
          i < whole ? Format<type>::Load(p + i * kSize) : LoadPart<type>(p + i * kSize, count - i);
    }
    char* at = (char*)(values + i);
    Floats value = Format<kFloat32>::Load(at);
    Format<kFloat32>::Store(at, kProduct ? value * operand : value + operand);
  }
}

template <bool kProduct>
void CombineAny(float* values, const Step& step, int64_t row, int64_t col, int64_t count) {
  if (step.type == kFloat16) {
    Combine<kFloat16, kProduct>(values, step, row, col, count);
  } else if (step.type == kBFloat16) {
    Combine<kBFloat16, kProduct>(values, step, row, col, count);
  } else {
    Combine<kFloat32, kProduct>(values, step, row, col, count);
  }
}

/*! \brief Store `count` values; `values` holds whole vectors. */
template <FloatType type>
void Narrow(char* to, const float* values, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Format<type>::Store(to + i * Format<type>::kSize,
                        Format<kFloat32>::Load((const char*)(values + i)));
  }
  if (i < count) {
    StorePart<type>(to + i * Format<type>::kSize, Format<kFloat32>::Load((const char*)(values + i)),
                    count - i);
  }
}

void Finish(const float* sums, int64_t ld_sums, int64_t rows, int64_t cols, const Step* steps,
            int num_steps, char* target, FloatType type, int64_t ld_target) {
  // Through a chunk in the nearest cache, step by step: each step is one loop over vectors.
  alignas(Isa::kBytes) float values[kChunk];
  const int64_t size = type == kFloat32 ? 4 : 2;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; col += kChunk) {
      const int64_t count = cols - col < kChunk ? cols - col : kChunk;
      const int64_t vectors = (count + kLanes - 1) / kLanes;
      // What follows the last value only has to be a number that was set.
      for (int64_t i = count; i < vectors * kLanes; ++i) values[i] = 0;
      __builtin_memcpy(values, sums + row * ld_sums + col, count * sizeof(float));
      for (int s = 0; s < num_steps; ++s) {
        switch (steps[s].kind) {
          case kStepAdd:
            CombineAny<false>(values, steps[s], row, col, count);
            break;
          case kStepMultiply:
            CombineAny<true>(values, steps[s], row, col, count);
            break;
          case kStepRelu:
            Map(values, vectors, [](Floats x) { return Relu(x); });
            break;
          case kStepGelu:
            Map(values, vectors, [](Floats x) { return Gelu(x); });
            break;
          case kStepGeluTanh:
            Map(values, vectors, [](Floats x) { return GeluTanh(x); });
            break;
          default:
            Map(values, vectors, [](Floats x) { return Silu(x); });
            break;
        }
      }
      char* to = target + (row * ld_target + col) * size;
      if (type == kFloat32) {
        __builtin_memcpy(to, values, count * sizeof(float));
      } else if (type == kFloat16) {
        Narrow<kFloat16>(to, values, count);
      } else {
        Narrow<kBFloat16>(to, values, count);
      }
    }
  }
}

#define TVM_IPC_SKINNY(type)                                        \
  {                                                                 \
    {Axpy<type, 1>, Axpy<type, 2>, Axpy<type, 3>, Axpy<type, 4>}, { \
      Dot<type, 1>, Dot<type, 2>, Dot<type, 3>, Dot<type, 4>        \
    }                                                               \
  }

constexpr BlasKernels MakeBlasKernels(const char* name) {
  return BlasKernels{
      name,
      {Widen<kFloat16>, Widen<kBFloat16>, Widen<kFloat32>},
      {TVM_IPC_SKINNY(kFloat16), TVM_IPC_SKINNY(kBFloat16), TVM_IPC_SKINNY(kFloat32)},
      Finish};
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_IMPL_H_
