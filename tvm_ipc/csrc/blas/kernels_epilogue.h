/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_epilogue.h
 * \brief Epilogue steps after a matmul; part of kernel_table_of_instruction_set.h.
 */
#ifndef TVM_IPC_BLAS_KERNELS_EPILOGUE_H_
#define TVM_IPC_BLAS_KERNELS_EPILOGUE_H_

#include "blas/kernels_float_conversion.h"

namespace tvm_ipc {
namespace {

/*! \brief Return e to the power x, with a relative error of 2e-7; 0 and infinity where they are
 *         nearest. */
TVM_IPC_INLINE Floats Exp(Floats x) {
  const Floats low = Splat(-87.5f), high = Splat(89.0f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  // Adding `magic` rounds to an integer, which is then in the low bits.
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
 * \brief Return x * (1 + erf(x / sqrt 2)) / 2. The error function is formula 7.1.26 of Abramowitz
 *        and Stegun, whose error is 1.5e-7.
 */
TVM_IPC_INLINE Floats Gelu(Floats x) {
  Floats size = (Floats)((Words)x & 0x7fffffffu) * 0.70710678118654752f;
  Floats t = 1.0f / (1.0f + 0.3275911f * size);
  Floats sum = t * 1.061405429f - 1.453152027f;
  sum = sum * t + 1.421413741f;
  sum = sum * t - 0.284496736f;
  sum = sum * t + 0.254829592f;
  // 1 - erf(size). For a negative x this equals 1 + erf(x / sqrt 2), without cancellation.
  Floats rest = sum * t * Exp(-(size * size));
  Floats zero = {};
  return 0.5f * x * (x < zero ? rest : 2.0f - rest);
}

/*! \brief Return x * (1 + tanh(u)) / 2 = x * sigmoid(2 u). */
TVM_IPC_INLINE Floats GeluTanh(Floats x) {
  Floats u = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return x / (1.0f + Exp(-2.0f * u));
}

TVM_IPC_INLINE Floats Relu(Floats x) {
  Floats zero = {};
  return x > zero ? x : zero;  // 0 for a NaN, as in TVM's kernels
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

/*! \brief Narrow and store `count` values; `values` holds whole vectors. */
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

inline void Finish(const float* sums, int64_t ld_sums, int64_t rows, int64_t cols,
                   const Step* steps, int num_steps, char* target, FloatType type,
                   int64_t ld_target) {
  // A chunk stays in the nearest cache while each step, one loop over vectors, is applied to it.
  alignas(Isa::kBytes) float values[kChunk];
  const int64_t size = type == kFloat32 ? 4 : 2;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; col += kChunk) {
      const int64_t count = cols - col < kChunk ? cols - col : kChunk;
      const int64_t vectors = (count + kLanes - 1) / kLanes;
      // The lanes after the last value are not stored, but must be initialized.
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

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_EPILOGUE_H_
