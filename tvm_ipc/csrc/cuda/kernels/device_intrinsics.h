/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file device_intrinsics.h
 * \brief The device functions that kernels use: memory access, threads, conversions, a clock.
 *
 * This file includes no CUDA header, so that NVRTC needs none. A build for another machine, such as
 * a CPU, defines TVM_IPC_KERNEL_DEVICE as the name of a file with the same functions.
 */
#ifndef TVM_IPC_CUDA_KERNELS_DEVICE_INTRINSICS_H_
#define TVM_IPC_CUDA_KERNELS_DEVICE_INTRINSICS_H_

#include "cuda/kernels/kernel_arguments_and_peer_memory.h"

namespace tvm_ipc {
namespace kernels {

/*! \brief 16 aligned bytes, which are loaded and stored in one access. */
struct alignas(16) Pair {
  uint64_t low;
  uint64_t high;
};

}  // namespace kernels
}  // namespace tvm_ipc

#ifdef TVM_IPC_KERNEL_DEVICE
#include TVM_IPC_KERNEL_DEVICE
#else

#define TVM_IPC_DEVICE __device__ __forceinline__
/*! \brief Marks functions that rarely run. */
#define TVM_IPC_RARE __device__ __noinline__
/*! \brief Define the kernel `name` with one argument, which it passes to a function. */
#define TVM_IPC_KERNEL(name, Args, function)                                                     \
  extern "C" __global__ void __launch_bounds__(512, 1) name(const __grid_constant__ Args args) { \
    function(args);                                                                              \
  }

namespace tvm_ipc {
namespace kernels {

TVM_IPC_DEVICE uint32_t Thread() { return threadIdx.x; }
TVM_IPC_DEVICE uint32_t Threads() { return blockDim.x; }
TVM_IPC_DEVICE uint32_t Block() { return blockIdx.x; }
TVM_IPC_DEVICE uint32_t Blocks() { return gridDim.x; }
TVM_IPC_DEVICE void SyncThreads() { __syncthreads(); }

/*! \brief Return the shared memory of the block for a type; there is one object of each type. */
template <typename T>
TVM_IPC_DEVICE T& Shared() {
  __shared__ T memory;
  return memory;
}

// Access to words that other devices or other blocks write. A pair is two words; each word is
// atomic.

TVM_IPC_DEVICE uint32_t LoadRelaxed(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
TVM_IPC_DEVICE uint32_t LoadAcquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
TVM_IPC_DEVICE void StoreRelaxed(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
TVM_IPC_DEVICE void StoreRelease(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
TVM_IPC_DEVICE uint64_t LoadWord(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
TVM_IPC_DEVICE void StoreWord(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
TVM_IPC_DEVICE Pair LoadPair(const void* p) {
  Pair v;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(v.low), "=l"(v.high)
               : "l"(p)
               : "memory");
  return v;
}
TVM_IPC_DEVICE Pair LoadPairAcquire(const void* p) {
  Pair v;
  asm volatile("ld.acquire.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(v.low), "=l"(v.high)
               : "l"(p)
               : "memory");
  return v;
}
TVM_IPC_DEVICE void StorePair(void* p, Pair v) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(v.low), "l"(v.high)
               : "memory");
}
TVM_IPC_DEVICE void StorePairRelease(void* p, Pair v) {
  asm volatile("st.release.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(v.low), "l"(v.high)
               : "memory");
}

// Access to words that only this device uses.

/*! \brief Add to a word and return its old value, with acquire and release. */
TVM_IPC_DEVICE uint32_t AddHere(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
/*! \brief Set a word to 1 if it is 0; return whether this thread has set it. */
TVM_IPC_DEVICE bool Claim(uint32_t* p) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.cas.b32 %0, [%1], 0, 1;" : "=r"(old) : "l"(p) : "memory");
  return old == 0;
}

// Access to memory that nobody else writes at the same time, or nobody else reads.

TVM_IPC_DEVICE Pair ReadPair(const void* p) {
  Pair v;
  asm volatile("ld.global.L1::no_allocate.v2.b64 {%0, %1}, [%2];"
               : "=l"(v.low), "=l"(v.high)
               : "l"(p)
               : "memory");
  return v;
}
TVM_IPC_DEVICE void WritePair(void* p, Pair v) {
  asm volatile("st.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(v.low), "l"(v.high) : "memory");
}

/*! \brief Prefetch the cache line of an address. */
TVM_IPC_DEVICE void Prefetch(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

/*! \brief Return this device's time in nanoseconds. */
TVM_IPC_DEVICE uint64_t Clock() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}
/*! \brief Pause in a polling loop; `turn` counts its iterations. */
TVM_IPC_DEVICE void Pause(uint32_t turn) {
  if (turn > 4096) asm volatile("nanosleep.u32 100;");
}

template <typename To, typename From>
TVM_IPC_DEVICE To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

TVM_IPC_DEVICE float WidenHalf(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
/*! \brief Convert to float16, rounding to nearest even. */
TVM_IPC_DEVICE uint16_t NarrowHalf(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
TVM_IPC_DEVICE float WidenBFloat(uint16_t bits) {
  return BitCast<float>(static_cast<uint32_t>(bits) << 16);
}
/*! \brief Convert to bfloat16, rounding to nearest even. */
TVM_IPC_DEVICE uint16_t NarrowBFloat(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
TVM_IPC_DEVICE float SquareRoot(float value) {
  float root;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(root) : "f"(value));
  return root;
}

}  // namespace kernels
}  // namespace tvm_ipc

#endif  // TVM_IPC_KERNEL_DEVICE
#endif  // TVM_IPC_CUDA_KERNELS_DEVICE_INTRINSICS_H_
