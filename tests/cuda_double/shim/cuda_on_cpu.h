// SPDX-License-Identifier: Apache-2.0
// What CUDA C, as TVM generates it, means on a CPU. Included before the generated source; the
// kernels' thread is the CpuThread of kernel_abi.h.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_SHIM_CUDA_ON_CPU_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_SHIM_CUDA_ON_CPU_H_

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>

#include "../kernel_abi.h"

#define __CUDA_ARCH__ 900
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

namespace cuda_on_cpu {

inline thread_local CpuThread* now = nullptr;

// Other threads of the block ran in between.
template <class F>
void Away(F&& call) {
  CpuThread* me = now;
  call(me);
  now = me;
}

inline uint32_t Index() {
  return (now->thread.z * now->block_size.y + now->thread.y) * now->block_size.x + now->thread.x;
}
inline uint32_t Lane() { return Index() % kCpuWarp; }

}  // namespace cuda_on_cpu

#define threadIdx (cuda_on_cpu::now->thread)
#define blockIdx (cuda_on_cpu::now->block)
#define blockDim (cuda_on_cpu::now->block_size)
#define gridDim (cuda_on_cpu::now->grid)
static constexpr int warpSize = kCpuWarp;

inline void __syncthreads() {
  cuda_on_cpu::Away([](CpuThread* me) { me->barrier(me); });
}
inline void __syncwarp(uint32_t lanes = 0xffffffffu) {
  cuda_on_cpu::Away([lanes](CpuThread* me) { me->warp_barrier(me, lanes); });
}
inline uint32_t __activemask() { return 0xffffffffu; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned) {
  cuda_on_cpu::Away([](CpuThread* me) { me->pause(me); });
}

// ---- between the lanes of a warp -------------------------------------------------------------

namespace cuda_on_cpu {

template <class T, class F>
auto Exchange(uint32_t lanes, T value, F&& read) {
  static_assert(sizeof(T) <= 16);
  memcpy(now->lanes[Lane()], &value, sizeof(T));
  __syncwarp(lanes);
  auto result = read([](uint32_t lane) {
    T of_lane;
    memcpy(&of_lane, now->lanes[lane], sizeof(T));
    return of_lane;
  });
  __syncwarp(lanes);
  return result;
}

template <class T>
T FromLane(uint32_t lanes, T value, int64_t lane, int64_t first, int64_t width) {
  // Beyond its part of the warp a lane keeps what it has.
  bool inside = lane >= first && lane < first + width;
  uint32_t from = inside ? static_cast<uint32_t>(lane) : Lane();
  return Exchange(lanes, value, [from](auto&& of) { return of(from); });
}

}  // namespace cuda_on_cpu

template <class T>
T __shfl_sync(uint32_t lanes, T value, int lane, int width = kCpuWarp) {
  int64_t first = cuda_on_cpu::Lane() / width * width;
  return cuda_on_cpu::FromLane(lanes, value, first + (lane & (width - 1)), first, width);
}
template <class T>
T __shfl_down_sync(uint32_t lanes, T value, unsigned by, int width = kCpuWarp) {
  int64_t me = cuda_on_cpu::Lane();
  return cuda_on_cpu::FromLane(lanes, value, me + by, me / width * width, width);
}
template <class T>
T __shfl_up_sync(uint32_t lanes, T value, unsigned by, int width = kCpuWarp) {
  int64_t me = cuda_on_cpu::Lane();
  return cuda_on_cpu::FromLane(lanes, value, me - by, me / width * width, width);
}
template <class T>
T __shfl_xor_sync(uint32_t lanes, T value, int mask, int width = kCpuWarp) {
  int64_t me = cuda_on_cpu::Lane();
  return cuda_on_cpu::FromLane(lanes, value, me ^ mask, me / width * width, width);
}
inline uint32_t __ballot_sync(uint32_t lanes, int predicate) {
  uint32_t there = 0;  // lanes of a block that ends within a warp vote no
  uint32_t count = blockDim.x * blockDim.y * blockDim.z;
  uint32_t first = cuda_on_cpu::Index() / kCpuWarp * kCpuWarp;
  for (uint32_t i = 0; i < kCpuWarp && first + i < count; ++i) there |= 1u << i;
  return cuda_on_cpu::Exchange(lanes, predicate, [lanes, there](auto&& of) {
    uint32_t votes = 0;
    for (uint32_t i = 0; i < kCpuWarp; ++i) {
      if ((lanes & there) >> i & 1) votes |= static_cast<uint32_t>(of(i) != 0) << i;
    }
    return votes;
  });
}
inline int __any_sync(uint32_t lanes, int predicate) {
  return __ballot_sync(lanes, predicate) != 0;
}
inline int __all_sync(uint32_t lanes, int predicate) {
  return __ballot_sync(lanes, !predicate) == 0;
}

// ---- memory ----------------------------------------------------------------------------------

template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T, class F>
T AtomicUpdate(T* at, F&& change) {
  T before, after;
  __atomic_load(at, &before, __ATOMIC_RELAXED);
  do {
    after = change(before);
  } while (
      !__atomic_compare_exchange(at, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}
template <class T>
T atomicAdd(T* at, T value) {
  return AtomicUpdate(at, [value](T before) { return static_cast<T>(before + value); });
}
template <class T>
T atomicMax(T* at, T value) {
  return AtomicUpdate(at, [value](T before) { return before < value ? value : before; });
}
template <class T>
T atomicMin(T* at, T value) {
  return AtomicUpdate(at, [value](T before) { return value < before ? value : before; });
}
template <class T>
T atomicCAS(T* at, T expected, T value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
template <class T>
T atomicExch(T* at, T value) {
  return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);
}

#include "arithmetic.h"
#include "vectors.h"

// ---- how the double finds a kernel -----------------------------------------------------------

namespace cuda_on_cpu {

template <class F, F* function>
struct Entry;
template <class... A, void (*function)(A...)>
struct Entry<void(A...), function> {
  static constexpr uint32_t count = sizeof...(A);
  static constexpr uint32_t sizes[] = {static_cast<uint32_t>(sizeof(A))..., 0};
  template <size_t... I>
  static void Apply(void* const* arguments, std::index_sequence<I...>) {
    (void)arguments;
    function(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
  }
  static void Run(CpuThread* thread, void* const* arguments) {
    now = thread;
    Apply(arguments, std::index_sequence_for<A...>());
  }
};

}  // namespace cuda_on_cpu

// Once for each kernel, behind the source.
#define CUDA_ON_CPU_KERNEL(name, static_shared, max_threads)                                    \
  extern "C" __attribute__((visibility("default")))                                             \
  const CpuKernel tvm_ipc_cpu_kernel_##name = {kCpuKernelAbi,                                   \
                                               cuda_on_cpu::Entry<decltype(name), name>::count, \
                                               cuda_on_cpu::Entry<decltype(name), name>::sizes, \
                                               &cuda_on_cpu::Entry<decltype(name), name>::Run,  \
                                               static_shared,                                   \
                                               max_threads};

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_SHIM_CUDA_ON_CPU_H_
