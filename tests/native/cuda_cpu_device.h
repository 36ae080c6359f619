/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file cuda_cpu_device.h
 * \brief What the CUDA kernels ask of the machine, on a CPU: the counterpart of
 *        cuda/kernels/device_intrinsics.h. Accesses of other ranks' memory are atomics of the same
 * order, so ThreadSanitizer finds what the kernels leave unordered.
 */
#ifndef TVM_IPC_TESTS_CUDA_CPU_DEVICE_H_
#define TVM_IPC_TESTS_CUDA_CPU_DEVICE_H_

#include <time.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "../cuda_double/kernel_abi.h"
#include "core/software_float16_conversion.h"
#include "cuda/kernels/kernel_arguments_and_peer_memory.h"

#define TVM_IPC_DEVICE inline
#define TVM_IPC_RARE inline __attribute__((noinline))
/*! \brief As tests/cuda_double finds it. */
#define TVM_IPC_KERNEL(name, Args, function)                                                      \
  static void name##_run(CpuThread* thread, void* const* arguments) {                             \
    current = thread;                                                                             \
    function(*static_cast<const Args*>(arguments[0]));                                            \
  }                                                                                               \
  static const uint32_t name##_sizes[] = {sizeof(Args)};                                          \
  extern "C" __attribute__((visibility("default"))) const CpuKernel tvm_ipc_cpu_kernel_##name = { \
      kCpuKernelAbi, 1, name##_sizes, name##_run, kSharedBytes, 512};

namespace tvm_ipc {
namespace kernels {

/*! \brief Who runs in this thread of the system. */
inline thread_local CpuThread* current = nullptr;

TVM_IPC_DEVICE uint32_t Thread() { return current->thread.x; }
TVM_IPC_DEVICE uint32_t Threads() { return current->block_size.x; }
TVM_IPC_DEVICE uint32_t Block() { return current->block.x; }
TVM_IPC_DEVICE uint32_t Blocks() { return current->grid.x; }
TVM_IPC_DEVICE void SyncThreads() {
  CpuThread* const me = current;
  me->barrier(me);
  current = me;
}

/*! \brief Of what all types that are shared in a block need together. */
constexpr uint32_t kSharedBytes = 36 << 10;

inline uint32_t ReserveShared(uint32_t bytes) {
  static std::atomic<uint32_t> used{0};
  const uint32_t start = used.fetch_add((bytes + 15) / 16 * 16);
  if (start + bytes > kSharedBytes) std::abort();
  return start;
}
template <typename T>
inline const uint32_t kSharedStart = ReserveShared(sizeof(T));
template <typename T>
TVM_IPC_DEVICE T& Shared() {
  return *reinterpret_cast<T*>(static_cast<uint8_t*>(current->static_shared) + kSharedStart<T>);
}

TVM_IPC_DEVICE uint32_t LoadRelaxed(const uint32_t* p) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
TVM_IPC_DEVICE uint32_t LoadAcquire(const uint32_t* p) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
TVM_IPC_DEVICE void StoreRelaxed(uint32_t* p, uint32_t v) {
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
TVM_IPC_DEVICE void StoreRelease(uint32_t* p, uint32_t v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
TVM_IPC_DEVICE uint64_t LoadWord(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
TVM_IPC_DEVICE void StoreWord(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }

template <int kOrder>
TVM_IPC_DEVICE Pair LoadBoth(const void* p) {
  const uint64_t* words = static_cast<const uint64_t*>(p);
  return {__atomic_load_n(words, kOrder), __atomic_load_n(words + 1, kOrder)};
}
template <int kOrder>
TVM_IPC_DEVICE void StoreBoth(void* p, Pair v) {
  uint64_t* words = static_cast<uint64_t*>(p);
  __atomic_store_n(words, v.low, kOrder);
  __atomic_store_n(words + 1, v.high, kOrder);
}
TVM_IPC_DEVICE Pair LoadPair(const void* p) { return LoadBoth<__ATOMIC_RELAXED>(p); }
TVM_IPC_DEVICE Pair LoadPairAcquire(const void* p) { return LoadBoth<__ATOMIC_ACQUIRE>(p); }
TVM_IPC_DEVICE void StorePair(void* p, Pair v) { StoreBoth<__ATOMIC_RELAXED>(p, v); }
TVM_IPC_DEVICE void StorePairRelease(void* p, Pair v) { StoreBoth<__ATOMIC_RELEASE>(p, v); }

TVM_IPC_DEVICE uint32_t AddHere(uint32_t* p, uint32_t v) {
  return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}
TVM_IPC_DEVICE bool Claim(uint32_t* p) {
  uint32_t none = 0;
  return __atomic_compare_exchange_n(p, &none, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

TVM_IPC_DEVICE Pair ReadPair(const void* p) {
  const uint64_t* words = static_cast<const uint64_t*>(p);
  return {words[0], words[1]};
}
TVM_IPC_DEVICE void WritePair(void* p, Pair v) {
  uint64_t* words = static_cast<uint64_t*>(p);
  words[0] = v.low;
  words[1] = v.high;
}

TVM_IPC_DEVICE void Prefetch(const void*) {}

TVM_IPC_DEVICE uint64_t Clock() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + now.tv_nsec;
}
TVM_IPC_DEVICE void Pause(uint32_t) {
  CpuThread* const me = current;
  me->pause(me);
  current = me;
}

TVM_IPC_DEVICE float WidenHalf(uint16_t bits) {
  return SoftWidenHalf<float, int32_t>(static_cast<uint32_t>(bits));
}
TVM_IPC_DEVICE uint16_t NarrowHalf(float value) {
  return static_cast<uint16_t>(SoftNarrowHalf<float, int32_t, uint32_t>(value));
}
TVM_IPC_DEVICE float WidenBFloat(uint16_t bits) {
  return BitCast<float>(static_cast<uint32_t>(bits) << 16);
}
TVM_IPC_DEVICE uint16_t NarrowBFloat(float value) {
  const uint32_t bits = BitCast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
TVM_IPC_DEVICE float SquareRoot(float value) { return __builtin_sqrtf(value); }

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_CUDA_CPU_DEVICE_H_
