/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file select_instruction_set.cc
 * \brief Selects kernels that the processor and the operating system support.
 */
#include "blas/select_instruction_set.h"

#include <atomic>
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tvm_ipc {
namespace {

const BlasKernels* KernelsFor(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0;
  // Not every compiler accepts "f16c" in __builtin_cpu_supports. F16C uses the registers of AVX.
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  if (std::strcmp(name, "avx512") == 0) {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return avx2 && avx512 ? &kAvx512Blas : nullptr;
  }
  if (std::strcmp(name, "avx2") == 0) return avx2 ? &kAvx2Blas : nullptr;
#endif
  return std::strcmp(name, "portable") == 0 ? &kPortableBlas : nullptr;
}

/*! \brief Return the bfloat16 kernels for vectors, or nullptr if the processor cannot run them. */
const TileKernels* Pairs() {
#if defined(__x86_64__)
  const bool pairs = KernelsFor("avx512") != nullptr && __builtin_cpu_supports("avx512bf16");
  return pairs ? &kPairKernels : nullptr;
#else
  return nullptr;
#endif
}

/*! \brief Return the bfloat16 kernels for tile registers if this process may use them, else those
 *         for vectors. Requests the permission, so it is called once. */
const TileKernels* FindTiles() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTile = 1u << 24, kBrain = 1u << 22;
  const bool tiles =
      __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kTile) != 0 && (d & kBrain) != 0;
  // Linux saves the 8 KB of tile registers only for processes that requested permission.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return &kTileKernels;
#endif
  return Pairs();
}

const TileKernels* Tiles() {
  static const TileKernels* const tiles = FindTiles();
  return tiles;
}

const BlasKernels* BestKernels() {
  for (const char* name : {"avx512", "avx2"}) {
    if (const BlasKernels* kernels = KernelsFor(name)) return kernels;
  }
  return &kPortableBlas;
}

// The tables are constant, so the pointer needs no memory ordering.
std::atomic<const BlasKernels*> current{nullptr};
enum class Brain { kBest, kPairs, kNone };
std::atomic<Brain> brain{Brain::kBest};

}  // namespace

const BlasKernels& CurrentBlasKernels() {
  const BlasKernels* kernels = current.load(std::memory_order_relaxed);
  if (kernels == nullptr) {
    kernels = BestKernels();
    current.store(kernels, std::memory_order_relaxed);
  }
  return *kernels;
}

const TileKernels* CurrentTiles() {
  switch (brain.load(std::memory_order_relaxed)) {
    case Brain::kBest:
      return Tiles();
    case Brain::kPairs:
      return Pairs();
    default:
      return nullptr;
  }
}

DotFn CurrentPairDot() {
#if defined(__x86_64__)
  static const bool here = Pairs() != nullptr;
  if (here && CurrentTiles() != nullptr) return kPairDot;
#endif
  return nullptr;
}

const AttentionKernels& CurrentAttention(FloatType type) {
#if defined(__x86_64__)
  if (type == kBFloat16 && CurrentPairDot() != nullptr) {
    return CurrentTiles() == &kTileKernels ? kTileAttention : kPairAttention;
  }
#endif
  return CurrentBlasKernels().attention;
}

bool OrdersSums() { return CurrentBlasKernels().packed.rows > 0; }

std::string BlasInstructionSet() {
  const TileKernels* tiles = CurrentTiles();
  return std::string(CurrentBlasKernels().name) + (tiles ? ", " : "") + (tiles ? tiles->name : "");
}

bool UseBlasInstructionSet(const char* name) {
  const bool best = std::strcmp(name, "auto") == 0, pairs = std::strcmp(name, "avx512bf16") == 0;
  const BlasKernels* kernels =
      best || (pairs && Pairs() != nullptr) ? BestKernels() : KernelsFor(name);
  if (kernels == nullptr) return false;
  current.store(kernels, std::memory_order_relaxed);
  brain.store(best    ? Brain::kBest
              : pairs ? Brain::kPairs
                      : Brain::kNone,
              std::memory_order_relaxed);
  return true;
}

}  // namespace tvm_ipc
