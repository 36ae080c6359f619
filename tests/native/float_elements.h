/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file float_elements.h
 * \brief Tensors of each float type in memory with guards around it, and threads, for kernels.
 */
#ifndef TVM_IPC_TESTS_NATIVE_FLOAT_ELEMENTS_H_
#define TVM_IPC_TESTS_NATIVE_FLOAT_ELEMENTS_H_

#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "blas/kernels_complementing_blas.h"
#include "blas/select_instruction_set.h"
#include "core/thread_pool.h"

namespace tvm_ipc {

inline int ThreeThreads() { return 3; }

inline void RunThreads(int threads, int tasks, void (*body)(int, void*), void* data) {
  ThreadPool::OfThread().Run(threads, tasks, body, data);
}

/*! \brief Return the instruction sets of this machine that have different kernels; the best and
 *         the portable one only if `few`. */
inline std::vector<std::string> InstructionSetsHere(bool few = false) {
  if (few) return {"auto", "portable"};
  std::vector<std::string> names;
  std::set<std::string> kernels;
  for (const char* name : {"avx512bf16", "avx512", "avx2", "portable", "auto"}) {
    const bool is_new = UseBlasInstructionSet(name) && kernels.insert(BlasInstructionSet()).second;
    if (is_new) names.push_back(name);
  }
  UseBlasInstructionSet("auto");
  return names;
}

/*! \brief Exactly as much memory as the elements take, of values that every type holds. */
struct Elements {
  FloatType type;
  std::vector<double> values;
  std::vector<char> memory;

  Elements(FloatType type, int64_t count, int seed) : type(type), values(count) {
    const int64_t size = type == kFloat64 ? 8 : type == kFloat32 ? 4 : 2;
    memory.resize(count * size);
    for (int64_t i = 0; i < count; ++i) {
      values[i] = static_cast<double>((i * 7 + seed * 5 + i / 11) % 9 - 4) / 4;
      Set(i, values[i]);
    }
  }
  void Set(int64_t i, double value) {
    const float single = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &single, 4);
    uint16_t half = static_cast<uint16_t>(bits >> 16);
    if (type == kFloat16) {
      // Quarters up to 4: normal numbers with few bits.
      half = bits == 0 ? 0
                       : static_cast<uint16_t>(((bits >> 16) & 0x8000) |
                                               (((bits & 0x7fffffff) - (112u << 23)) >> 13));
    }
    switch (type) {
      case kFloat64:
        std::memcpy(memory.data() + i * 8, &value, 8);
        break;
      case kFloat32:
        std::memcpy(memory.data() + i * 4, &single, 4);
        break;
      default:
        std::memcpy(memory.data() + i * 2, &half, 2);
    }
  }
  /*! \brief Return an element that a kernel has stored. */
  double Get(int64_t i) const {
    if (type == kFloat64) {
      double value;
      std::memcpy(&value, memory.data() + i * 8, 8);
      return value;
    }
    uint32_t bits = 0;
    float value;
    if (type == kFloat32) {
      std::memcpy(&bits, memory.data() + i * 4, 4);
    } else {
      uint16_t half;
      std::memcpy(&half, memory.data() + i * 2, 2);
      bits = static_cast<uint32_t>(half) << 16;
      if (type == kFloat16) {
        const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
        bits = rest == 0 ? sign
                         : sign | (rest >= 0x7c00 ? 0x7f800000u | rest << 13
                                                  : (rest << 13) + (112u << 23));
      }
    }
    std::memcpy(&value, &bits, 4);
    return value;
  }
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_NATIVE_FLOAT_ELEMENTS_H_
