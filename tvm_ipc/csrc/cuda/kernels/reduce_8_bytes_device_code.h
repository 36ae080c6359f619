/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_8_bytes_device_code.h
 * \brief Reductions of 8 bytes over the sources in their order, with the same bits as on the CPU.
 *
 * If there are NaNs, the result is the first one in the order of the sources, made quiet. An
 * invalid operation gives the positive quiet NaN without payload. If values compare equal in min or
 * max, zeros of either sign included, the first one is the result.
 */
#ifndef TVM_IPC_CUDA_KERNELS_REDUCE_8_BYTES_DEVICE_CODE_H_
#define TVM_IPC_CUDA_KERNELS_REDUCE_8_BYTES_DEVICE_CODE_H_

#include "cuda/kernels/element.h"

namespace tvm_ipc {
namespace kernels {

/*! \brief Call a function with the operation that combines two accumulators, so that the kind is
 *         tested only once. */
template <typename Type, typename Function>
TVM_IPC_DEVICE void WithOperation(uint32_t kind, const Function& function) {
  using Scalar = typename Type::Scalar;
  if constexpr (!Type::kFloating && !Type::kTruth) {
    switch (kind) {
      case kBand:
        return function([](Scalar a, Scalar x) { return a & x; });
      case kBor:
        return function([](Scalar a, Scalar x) { return a | x; });
      case kBxor:
        return function([](Scalar a, Scalar x) { return a ^ x; });
      default:
        break;
    }
  }
  if (Type::kTruth) kind = kind == kSum || kind == kTreeSum ? kMax : kind == kProd ? kMin : kind;
  switch (kind) {
    case kProd:
      return function([](Scalar a, Scalar x) { return Type::Multiply(a, x); });
    case kMin:
      return function([](Scalar a, Scalar x) { return x < a ? x : a; });
    case kMax:
      return function([](Scalar a, Scalar x) { return x > a ? x : a; });
    default:
      return function([](Scalar a, Scalar x) { return Type::Add(a, x); });
  }
}

/*! \brief Return the average of 64-bit integers, rounded towards zero. Their sum has two words. */
template <typename Type, typename Source>
TVM_IPC_DEVICE uint64_t AverageWords(const Source& source, int size) {
  uint64_t low = 0;
  int64_t high = 0;
  for (int k = 0; k < size; ++k) {
    const uint64_t word = source(k);
    low += word;
    high += (low < word) - (Type::kSigned && static_cast<int64_t>(word) < 0);
  }
  const bool negative = high < 0;
  uint64_t upper = static_cast<uint64_t>(high);
  if (negative) {
    low = ~low + 1;
    upper = ~upper + (low == 0);
  }
  // Divide 32 bits at a time: the upper word is less than the size.
  const uint64_t divisor = size;
  const uint64_t first = upper % divisor << 32 | low >> 32;
  const uint64_t second = first % divisor << 32 | (low & 0xffffffffu);
  const uint64_t quotient = first / divisor << 32 | second / divisor;
  return negative ? ~quotient + 1 : quotient;
}

template <typename Type>
TVM_IPC_DEVICE bool IsNan(typename Type::Bits bits) {
  return (bits & Type::kMagnitude) > Type::kInfinity;
}

/*! \brief Return whether a reduction adds as a tree that differs from adding in rank order. */
template <typename Type>
TVM_IPC_DEVICE bool AddsAsTree(int size, uint32_t kind) {
  return Type::kFloating && kind == kTreeSum && size > 3;
}

/*!
 * \brief Return element i of the sources' sum as a balanced binary tree. `trees` are the complete
 *        subtrees so far, one for each bit of the number of sources; constant indices keep them in
 *        registers.
 */
template <typename Type, typename Source>
TVM_IPC_DEVICE typename Type::Scalar TreeSum(const Source& source, int size, int i) {
  using Scalar = typename Type::Scalar;
  constexpr int kLevels = 7;  // up to 127 sources
  Scalar trees[kLevels] = {};
#pragma unroll 1
  for (int k = 0; k < size; ++k) {
    Scalar tree = Type::Widen(At<Type>(source(k), i));
    bool carries = true;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const bool full = (k >> level & 1) != 0;
      if (carries && full) tree = Type::Add(trees[level], tree);
      if (carries && !full) trees[level] = tree;
      carries = carries && full;
    }
  }
  Scalar sum = {};
  bool begun = false;
#pragma unroll
  for (int level = 0; level < kLevels; ++level) {
    if ((size >> level & 1) == 0) continue;
    sum = begun ? Type::Add(trees[level], sum) : trees[level];
    begun = true;
  }
  return sum;
}

/*!
 * \brief Reduce element by element, following the rules for NaN; also used for averages of
 *        integers and sums as a tree.
 * \param source A function that returns the 8 bytes of source k.
 */
template <typename Type, typename Source>
TVM_IPC_DEVICE uint64_t FoldCarefully(const Source& source, int size, uint32_t kind) {
  using Bits = typename Type::Bits;
  if constexpr (!Type::kHoldsSums) {
    if (kind == kAvg) return AverageWords<Type>(source, size);
  }
  uint64_t all = 0;
#pragma unroll 1
  for (int i = 0; i < Type::kIn8; ++i) {
    Bits result = 0;
    bool nan = false;
    if constexpr (Type::kFloating) {
#pragma unroll 1
      for (int k = 0; k < size && !nan; ++k) {
        result = At<Type>(source(k), i);
        nan = IsNan<Type>(result);
      }
    }
    if (nan) {
      if constexpr (Type::kFloating) result = static_cast<Bits>(result | Type::kQuiet);
    } else {
      typename Type::Scalar sum = Type::Widen(At<Type>(source(0), i));
      if (AddsAsTree<Type>(size, kind)) {
        if constexpr (Type::kFloating) sum = TreeSum<Type>(source, size, i);
      } else {
        WithOperation<Type>(kind, [&](auto operation) {
#pragma unroll 1
          for (int k = 1; k < size; ++k) sum = operation(sum, Type::Widen(At<Type>(source(k), i)));
        });
      }
      if (kind == kAvg) sum = Type::Divide(sum, size);
      result = Type::Narrow(sum);
      if constexpr (Type::kFloating) {
        if (sum != sum) result = static_cast<Bits>(Type::kInfinity | Type::kQuiet);
      }
    }
    all = With<Type>(all, i, result);
  }
  return all;
}

/*! \brief A reduction of 8 bytes from sources that are added one after the other. */
template <typename Type>
class Fold {
 public:
  TVM_IPC_DEVICE void Add(uint64_t eight, uint32_t kind, bool first) {
    typename Type::Scalar x[Type::kIn8];
#pragma unroll
    for (int i = 0; i < Type::kIn8; ++i) {
      const typename Type::Bits bits = At<Type>(eight, i);
      if constexpr (Type::kFloating) {
        // Comparisons drop a NaN; sums and products keep it.
        if (kind == kMin || kind == kMax) unusual_ = unusual_ || IsNan<Type>(bits);
      }
      x[i] = Type::Widen(bits);
    }
    if (first) {
#pragma unroll
      for (int i = 0; i < Type::kIn8; ++i) sum_[i] = x[i];
      return;
    }
    WithOperation<Type>(kind, [&](auto operation) {
#pragma unroll
      for (int i = 0; i < Type::kIn8; ++i) sum_[i] = operation(sum_[i], x[i]);
    });
  }

  /*! \brief Return the result. If unusual() is true then, discard it and use FoldCarefully. */
  TVM_IPC_DEVICE uint64_t Result(int size, uint32_t kind) {
    uint64_t eight = 0;
    if constexpr (!Type::kFloating) unusual_ = kind == kAvg;
    if constexpr (Type::kFloating) unusual_ = unusual_ || AddsAsTree<Type>(size, kind);
#pragma unroll
    for (int i = 0; i < Type::kIn8; ++i) {
      typename Type::Scalar value = sum_[i];
      if constexpr (Type::kFloating) {
        if (kind == kAvg) value = Type::Divide(value, size);
        unusual_ = unusual_ || value != value;
      }
      eight = With<Type>(eight, i, Type::Narrow(value));
    }
    return eight;
  }
  /*! \brief Return whether the result has a NaN, is an average of integers or adds as a tree. */
  TVM_IPC_DEVICE bool unusual() const { return unusual_; }

 private:
  typename Type::Scalar sum_[Type::kIn8] = {};
  bool unusual_ = false;
};

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_REDUCE_8_BYTES_DEVICE_CODE_H_
