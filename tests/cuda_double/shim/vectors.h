// SPDX-License-Identifier: Apache-2.0
// float4 and its kin.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_SHIM_VECTORS_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_SHIM_VECTORS_H_

#include "arithmetic.h"

#define CUDA_ON_CPU_VECTORS(type, name)                                                       \
  struct name##1 { type x; };                                                                 \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                    \
  struct name##3 { type x, y, z; };                                                           \
  struct alignas(4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type)) name##4 { type x, y, z, w; }; \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                            \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                 \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
CUDA_ON_CPU_VECTORS(signed char, char)
CUDA_ON_CPU_VECTORS(unsigned char, uchar)
CUDA_ON_CPU_VECTORS(short, short)
CUDA_ON_CPU_VECTORS(unsigned short, ushort)
CUDA_ON_CPU_VECTORS(int, int)
CUDA_ON_CPU_VECTORS(unsigned int, uint)
CUDA_ON_CPU_VECTORS(long, long)
CUDA_ON_CPU_VECTORS(unsigned long, ulong)
CUDA_ON_CPU_VECTORS(long long, longlong)
CUDA_ON_CPU_VECTORS(unsigned long long, ulonglong)
CUDA_ON_CPU_VECTORS(float, float)
CUDA_ON_CPU_VECTORS(double, double)
#undef CUDA_ON_CPU_VECTORS

struct alignas(4) __half2 {
  half x, y;
};
using half2 = __half2;
inline half2 make_half2(half x, half y) { return {x, y}; }
inline half2 __halves2half2(half x, half y) { return {x, y}; }
struct alignas(4) __nv_bfloat162 {
  nv_bfloat16 x, y;
};
using nv_bfloat162 = __nv_bfloat162;
inline nv_bfloat162 make_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return {x, y}; }
inline nv_bfloat162 __halves2bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return {x, y}; }

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_SHIM_VECTORS_H_
