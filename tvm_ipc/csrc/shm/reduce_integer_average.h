/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_integer_average.h
 * \brief Averages of integers; part of reduce_impl.h.
 */
#ifndef TVM_IPC_SHM_REDUCE_INTEGER_AVERAGE_H_
#define TVM_IPC_SHM_REDUCE_INTEGER_AVERAGE_H_

#include <cstddef>
#include <cstdint>

namespace tvm_ipc {
namespace {

/*!
 * \brief Compute the average of integers of up to 32 bits, whose sum as an Acc is exact. The
 *        division is in double, since the sum has less than 53 bits: the quotient is further from
 *        the next integer than the rounding error, and vectors can divide doubles. Results are not
 *        streamed, because the division is slower than memory.
 */
template <typename T, typename Acc>
void AverageIntegers(void* dst, const void* const* src, int num_src, size_t count, bool) {
  constexpr size_t kBlock = 256;
  Acc sum[kBlock];
  T value[kBlock];
  if (num_src < 1) return;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    size_t n = count - begin < kBlock ? count - begin : kBlock;
    for (size_t i = 0; i < n; ++i) sum[i] = 0;
    for (int k = 0; k < num_src; ++k) {
      const char* from = static_cast<const char*>(src[k]) + begin * sizeof(T);
      __builtin_memcpy(value, from, n * sizeof(T));
      for (size_t i = 0; i < n; ++i) sum[i] += static_cast<Acc>(value[i]);
    }
    for (size_t i = 0; i < n; ++i)
      value[i] = static_cast<T>(static_cast<Acc>(static_cast<double>(sum[i]) / num_src));
    __builtin_memcpy(static_cast<char*>(dst) + begin * sizeof(T), value, n * sizeof(T));
  }
}

/*!
 * \brief Compute the average of 64-bit integers. The sum has two words, which vectors can add. If
 *        it fits in the lower word, as it nearly always does, one 64-bit division is enough.
 */
template <typename T>
void AverageWords(void* dst, const void* const* src, int num_src, size_t count, bool) {
  __extension__ typedef __int128 Wide;
  constexpr size_t kBlock = 256;
  constexpr bool kSigned = static_cast<T>(-1) < 0;
  uint64_t low[kBlock];
  int64_t high[kBlock];
  T value[kBlock];
  if (num_src < 1) return;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    size_t n = count - begin < kBlock ? count - begin : kBlock;
    for (size_t i = 0; i < n; ++i) low[i] = 0, high[i] = 0;
    for (int k = 0; k < num_src; ++k) {
      const char* from = static_cast<const char*>(src[k]) + begin * sizeof(T);
      __builtin_memcpy(value, from, n * sizeof(T));
      for (size_t i = 0; i < n; ++i) {
        uint64_t word = static_cast<uint64_t>(value[i]);
        low[i] += word;
        high[i] += (low[i] < word) - (kSigned && value[i] < 0);
      }
    }
    T divisor = static_cast<T>(num_src);
    for (size_t i = 0; i < n; ++i) {
      T word = static_cast<T>(low[i]);
      if (__builtin_expect(high[i] == (kSigned && word < 0 ? -1 : 0), 1)) {
        value[i] = word / divisor;
      } else {
        Wide sum = static_cast<Wide>(high[i]) * (static_cast<Wide>(1) << 64) + low[i];
        value[i] = static_cast<T>(sum / num_src);
      }
    }
    __builtin_memcpy(static_cast<char*>(dst) + begin * sizeof(T), value, n * sizeof(T));
  }
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_REDUCE_INTEGER_AVERAGE_H_
