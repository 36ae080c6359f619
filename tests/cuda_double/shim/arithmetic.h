// SPDX-License-Identifier: Apache-2.0
// 16-bit floats, and functions of CUDA that C++ has by another name.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_SHIM_ARITHMETIC_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_SHIM_ARITHMETIC_H_

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace cuda_on_cpu {

inline uint32_t Bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float Float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// To the nearest, and to even between two.
inline uint16_t ToHalf(float value) {
  uint32_t bits = Bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7fff);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // subnormal: the addition rounds
    float shifted = Float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (Bits(shifted) - 0x3f000000));
  }
  uint32_t rounded = magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | rounded >> 13);
}
inline float FromHalf(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return Float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) return (sign ? -1.0f : 1.0f) * static_cast<float>(magnitude) * 0x1p-24f;
  return Float(sign | ((magnitude << 13) + 0x38000000));
}
inline uint16_t ToBfloat(float value) {
  uint32_t bits = Bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float FromBfloat(uint16_t bits) { return Float(static_cast<uint32_t>(bits) << 16); }

template <uint16_t (*to)(float), float (*from)(uint16_t)>
struct Float16 {
  uint16_t bits;
  Float16() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  Float16(T value) : bits(to(static_cast<float>(value))) {}
  template <uint16_t (*to2)(float), float (*from2)(uint16_t)>
  explicit Float16(Float16<to2, from2> other) : bits(to(static_cast<float>(other))) {}
  operator float() const { return from(bits); }
  Float16 operator-() const { return Float16(-static_cast<float>(*this)); }
#define CUDA_ON_CPU_OPERATOR(op)                                        \
  friend Float16 operator op(Float16 a, Float16 b) {                    \
    return Float16(static_cast<float>(a) op static_cast<float>(b));     \
  }                                                                     \
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> \
  friend Float16 operator op(Float16 a, T b) {                          \
    return a op Float16(b);                                             \
  }                                                                     \
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> \
  friend Float16 operator op(T a, Float16 b) {                          \
    return Float16(a) op b;                                             \
  }                                                                     \
  Float16& operator op## = (Float16 b) { return *this = *this op b; }
  CUDA_ON_CPU_OPERATOR(+)
  CUDA_ON_CPU_OPERATOR(-)
  CUDA_ON_CPU_OPERATOR(*)
  CUDA_ON_CPU_OPERATOR(/)
#undef CUDA_ON_CPU_OPERATOR
#define CUDA_ON_CPU_COMPARISON(op)                         \
  friend bool operator op(Float16 a, Float16 b) {          \
    return static_cast<float>(a) op static_cast<float>(b); \
  }
  CUDA_ON_CPU_COMPARISON(<)
  CUDA_ON_CPU_COMPARISON(>)
  CUDA_ON_CPU_COMPARISON(<=)
  CUDA_ON_CPU_COMPARISON(>=)
  CUDA_ON_CPU_COMPARISON(==)
  CUDA_ON_CPU_COMPARISON(!=)
#undef CUDA_ON_CPU_COMPARISON
};

}  // namespace cuda_on_cpu

using __half = cuda_on_cpu::Float16<cuda_on_cpu::ToHalf, cuda_on_cpu::FromHalf>;
using half = __half;
using __nv_bfloat16 = cuda_on_cpu::Float16<cuda_on_cpu::ToBfloat, cuda_on_cpu::FromBfloat>;
using nv_bfloat16 = __nv_bfloat16;

inline float __half2float(half value) { return value; }
inline half __float2half(float value) { return half(value); }
inline half __float2half_rn(float value) { return half(value); }
inline float __bfloat162float(nv_bfloat16 value) { return value; }
inline nv_bfloat16 __float2bfloat16(float value) { return nv_bfloat16(value); }
inline unsigned short __half_as_ushort(half value) { return value.bits; }
inline unsigned short __bfloat16_as_ushort(nv_bfloat16 value) { return value.bits; }

#define CUDA_ON_CPU_OF_16(name, expression)                                    \
  inline half name(half x) { return half(expression(static_cast<float>(x))); } \
  inline nv_bfloat16 name(nv_bfloat16 x) { return nv_bfloat16(expression(static_cast<float>(x))); }
CUDA_ON_CPU_OF_16(hexp, expf)
CUDA_ON_CPU_OF_16(hexp2, exp2f)
CUDA_ON_CPU_OF_16(hlog, logf)
CUDA_ON_CPU_OF_16(hlog2, log2f)
CUDA_ON_CPU_OF_16(hlog10, log10f)
CUDA_ON_CPU_OF_16(hsqrt, sqrtf)
CUDA_ON_CPU_OF_16(hrsqrt, 1.0f / sqrtf)
CUDA_ON_CPU_OF_16(hcos, cosf)
CUDA_ON_CPU_OF_16(hsin, sinf)
CUDA_ON_CPU_OF_16(hceil, ceilf)
CUDA_ON_CPU_OF_16(hfloor, floorf)
CUDA_ON_CPU_OF_16(hrint, rintf)
CUDA_ON_CPU_OF_16(htrunc, truncf)
CUDA_ON_CPU_OF_16(htanh, tanhf)
CUDA_ON_CPU_OF_16(__habs, fabsf)
#undef CUDA_ON_CPU_OF_16
template <class T>
bool __hgt(T a, T b) {
  return a > b;
}
template <class T>
bool __hlt(T a, T b) {
  return a < b;
}

// NaN yields to a number, as the device's instructions have it.
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
#define CUDA_ON_CPU_EXTREMA(type)                           \
  inline type max(type a, type b) { return a > b ? a : b; } \
  inline type min(type a, type b) { return a < b ? a : b; }
CUDA_ON_CPU_EXTREMA(int)
CUDA_ON_CPU_EXTREMA(unsigned int)
CUDA_ON_CPU_EXTREMA(long)
CUDA_ON_CPU_EXTREMA(unsigned long)
CUDA_ON_CPU_EXTREMA(long long)
CUDA_ON_CPU_EXTREMA(unsigned long long)
#undef CUDA_ON_CPU_EXTREMA

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / ::sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __float_as_uint(float x) { return cuda_on_cpu::Bits(x); }
inline int __float_as_int(float x) { return static_cast<int>(cuda_on_cpu::Bits(x)); }
inline float __uint_as_float(unsigned x) { return cuda_on_cpu::Float(x); }
inline float __int_as_float(int x) { return cuda_on_cpu::Float(static_cast<unsigned>(x)); }

#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")
#define CUDART_INF __builtin_inf()
#define CUDART_NAN __builtin_nan("")

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_SHIM_ARITHMETIC_H_
