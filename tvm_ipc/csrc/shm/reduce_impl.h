/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_impl.h
 * \brief The reductions, written once over vectors; included by one file per instruction set,
 *        after it has defined `struct Isa` in the anonymous namespace of tvm_ipc:
 *
 *   kBytes                     width of a vector
 *   Raw, F32, F64              the vector as bits, as floats, as doubles
 *   LoadPart, StorePart        the first bytes of a vector, fewer than kBytes; zeros elsewhere
 *   kHasStream                 whether Stream() bypasses the caches
 *   Stream(p, raw), Fence()    store past the caches to an aligned address; make such stores
 *                              visible
 *   Unordered(a, b)            non-zero if a lane of a or b is NaN, for F32 and F64
 *   Halves(a, b, upper, lower) the upper and the lower halves of words; those of a word of b
 *                              follow those of the same word of a
 *   WidenHalf(p, low, high)    a vector of float16 from memory as two F32; NaN may give anything,
 *                              and where kHalvesInOrder is set, NaN
 *   NarrowHalf(low, high)      the reverse, to nearest even
 *   kHalvesInOrder             whether `low` has the first half of the vector
 *   MultiplyAdd(a, b, c)       a * b + c; kFused: whether that is one instruction
 *
 * Memory is read and written once: a few vectors of the result are accumulated over all sources in
 * registers, then stored.
 *
 * NaN: processors differ in which NaN they return, and compilers may swap the operands of an
 * addition. So the vector code only checks whether there is a NaN in the results that it is about
 * to store. If so, it discards them and computes these elements one by one. The result is then the
 * first NaN in source order, made quiet; an invalid operation gives the positive quiet NaN without
 * payload. By IEEE 754 all other results are the same everywhere.
 *
 * Zeros and ties in min and max: the first of equal elements is the result.
 */
#ifndef TVM_IPC_SHM_REDUCE_IMPL_H_
#define TVM_IPC_SHM_REDUCE_IMPL_H_

#include <cstddef>
#include <cstdint>

#include "shm/normalize_row_impl.h"
#include "shm/reduce_formats_and_operations.h"
#include "shm/reduce_integer_average.h"
#include "shm/reduce_table.h"

namespace tvm_ipc {
namespace {

constexpr size_t kLine = 64;
constexpr int kUnroll = 4;
// Prefetch distance in bytes. The hardware prefetcher stops at the end of a page. Much larger
// distances are slower, by a sixth on Zen 4 for data in its L3 cache.
constexpr size_t kAhead = 512;
// Below this size, for data in the L2 cache, memcpy is as fast.
constexpr size_t kLongCopy = 256 * 1024;

template <bool kStream>
TVM_IPC_INLINE void Store(char* p, Raw v) {
  if (kStream) {
    Isa::Stream(p, v);
  } else {
    __builtin_memcpy(p, &v, kVector);
  }
}

/*! \brief Keep the compiler from mixing the stores of two lines, which would stream half lines. */
TVM_IPC_INLINE void KeepOrder() { __asm__ volatile("" ::: "memory"); }

template <size_t kBytes>
TVM_IPC_INLINE void Prefetch(const char* p) {
  for (size_t i = 0; i < kBytes; i += kLine) __builtin_prefetch(p + kAhead + i);
}

/*! \brief The vectors of one step: kParts accumulators for each of kVectors vectors of memory. */
template <typename Format, int kVectors>
struct Registers {
  static constexpr int kCount = kVectors * Format::kParts;
  typename Format::Vector v[kCount];

  TVM_IPC_INLINE void Read(const char* p, size_t part) {
    if (part != 0) {
      Raw raw = Isa::LoadPart(p, part);
      Format::Unpack(reinterpret_cast<const char*>(&raw), v);
    } else {
      for (int i = 0; i < kVectors; ++i) Format::Unpack(p + i * kVector, v + i * Format::kParts);
    }
  }

  TVM_IPC_INLINE bool HasNan() const {
    if constexpr (Isa::kFused && IsHalf<Format>::value) {
      // NaN survives products and sums, and the units that compute these are idle while others
      // convert. Infinities may give NaN here too; no other value is large enough.
      auto all = v[0];
      for (int i = 1; i + 2 < kCount; i += 2) all = MultiplyAdd(all, v[i], v[i + 1]);
      if (__builtin_expect(Unordered(all, v[kCount - 1]) == 0, 1)) return false;
    }
    unsigned found = 0;
    for (int i = 0; i < kCount; i += 2) found |= Unordered(v[i], v[i + 1 < kCount ? i + 1 : i]);
    return found != 0;
  }

  /*! \brief Return whether any element is NaN, or one for which Pack would be wrong. */
  TVM_IPC_INLINE bool HasUnusual() const {
    unsigned found = 0;
    for (int i = 0; i < kCount; ++i) found |= Format::Unusual(v[i]);
    return found != 0;
  }

  static TVM_IPC_INLINE Floats MultiplyAdd(Floats a, Floats b, Floats c) {
    return (Floats)Isa::MultiplyAdd((Isa::F32)a, (Isa::F32)b, (Isa::F32)c);
  }
  static TVM_IPC_INLINE unsigned Unordered(Floats a, Floats b) {
    return Isa::Unordered((Isa::F32)a, (Isa::F32)b);
  }
  static TVM_IPC_INLINE unsigned Unordered(VectorOf<double>::Type a, VectorOf<double>::Type b) {
    return Isa::Unordered((Isa::F64)a, (Isa::F64)b);
  }
};

/*! \brief Whether Format holds floats: only these define kInfinity. */
template <typename Format, typename = void>
struct HoldsFloats {
  static constexpr bool value = false;
};
template <typename Format>
struct HoldsFloats<Format, decltype((void)Format::kInfinity)> {
  static constexpr bool value = true;
};

// Levels of a tree over 256 sources, more than there are ranks.
constexpr int kTreeLevels = 9;

/*!
 * \brief Combine sources as a balanced binary tree in their order; `num_src` is more than 0.
 *
 * The complete subtrees so far have sizes that are the bits of the number of sources read, so a
 * subtree is complete if the corresponding lower bits carry, as in a binary counter.
 * \param read Called as read(k, &block) for each source, in order.
 * \param add Called as add(&left, right) to add a right subtree to a left one.
 */
template <typename Block, typename Read, typename Add>
TVM_IPC_INLINE void CombineTree(int num_src, Block* result, const Read& read, const Add& add) {
  Block trees[kTreeLevels];
  int depth = 0;
  for (int k = 0; k < num_src; k += 2) {
    Block& pair = trees[depth++];
    read(k, &pair);
    if (k + 1 < num_src) {
      Block right;
      read(k + 1, &right);
      add(&pair, right);
      for (int carry = k / 2; (carry & 1) != 0; carry >>= 1, --depth)
        add(&trees[depth - 2], trees[depth - 1]);
    }
  }
  for (; depth > 1; --depth) add(&trees[depth - 2], trees[depth - 1]);
  *result = trees[0];
}

/*! \brief Reduce elements one by one, with the rules for NaN. */
template <typename Format, typename Op>
__attribute__((noinline, cold)) void ReduceCarefully(char* dst, const void* const* src, int num_src,
                                                     size_t begin, size_t end) {
  using Bits = typename Format::Bits;
  using Scalar = typename Format::Scalar;
  auto load = [src](int k, size_t at) {
    Bits bits;
    __builtin_memcpy(&bits, static_cast<const char*>(src[k]) + at, sizeof(bits));
    return bits;
  };
  auto is_nan = [](Bits bits) { return (bits & Format::kMagnitude) > Format::kInfinity; };
  for (size_t at = begin; at < end; at += sizeof(Bits)) {
    Bits result = 0;
    bool nan = false;
    for (int k = 0; k < num_src && !nan; ++k) {
      result = load(k, at);
      nan = is_nan(result);
    }
    if (nan) {
      result = static_cast<Bits>(result | Format::kQuiet);
    } else {
      Scalar acc = Format::Widen(load(0, at));
      if constexpr (Op::kTree) {
        CombineTree<Scalar>(
            num_src, &acc, [&](int k, Scalar* to) { *to = Format::Widen(load(k, at)); },
            [](Scalar* left, Scalar right) { *left = Op::template Apply<Format>(*left, right); });
      } else {
        for (int k = 1; k < num_src; ++k)
          acc = Op::template Apply<Format>(acc, Format::Widen(load(k, at)));
      }
      if (Op::kDivide) acc = acc / static_cast<Scalar>(num_src);
      result =
          acc != acc ? static_cast<Bits>(Format::kInfinity | Format::kQuiet) : Format::Narrow(acc);
    }
    __builtin_memcpy(dst + at, &result, sizeof(result));
  }
}

/*! \brief The arguments of a step. */
struct Job {
  char* dst;
  const void* const* src;
  int num_src;
  const char* first;
  const char* second;
  size_t bytes;
  bool stream;

  // kSources is the number of sources, or 0 if it is known only at run time.
  template <int kSources>
  TVM_IPC_INLINE int Sources() const {
    return kSources != 0 ? kSources : num_src;
  }
  template <int kSources>
  TVM_IPC_INLINE const char* Source(int k) const {
    if (kSources == 2) return k == 0 ? first : second;
    return static_cast<const char*>(src[k]);
  }
};

/*! \brief Store kVectors vectors at byte `at`, or `part` bytes of one if that is not 0. */
template <typename Format, int kVectors>
TVM_IPC_INLINE void StoreBlock(const Job& job, size_t at, size_t part,
                               const typename Format::Vector* v) {
  char* out = job.dst + at;
  for (int i = 0; i < kVectors; ++i) {
    Raw raw = Format::Pack(v + i * Format::kParts);
    if (part != 0) {
      Isa::StorePart(out, raw, part);
    } else if (job.stream) {
      Store<true>(out + i * kVector, raw);
      if ((i + 1) * kVector % kLine == 0) KeepOrder();
    } else {
      Store<false>(out + i * kVector, raw);
    }
  }
}

/*!
 * \brief Compute and store the result for kVectors vectors at byte `at`, or, if `part` is not 0,
 *        for that many bytes of one.
 */
template <typename Format, typename Op, int kVectors, int kSources>
TVM_IPC_INLINE void Step(const Job& job, size_t at, size_t part) {
  constexpr bool kFloats = HoldsFloats<Format>::value;
  using Scalar = typename Format::Scalar;
  using Block = Registers<Format, kVectors>;
  int num_src = job.Sources<kSources>();
  Block acc, x;
  bool nan = false;
  bool prefetch = kVectors > 1 && at + kAhead + kVectors * kVector <= job.bytes;
  auto read = [&](int k, Block* to) __attribute__((always_inline)) {
    to->Read(job.Source<kSources>(k) + at, part);
    if (prefetch) Prefetch<kVectors * kVector>(job.Source<kSources>(k) + at);
  };
  auto apply = [](Block* to, const Block& from) __attribute__((always_inline)) {
    for (int i = 0; i < Block::kCount; ++i)
      to->v[i] = Op::template Apply<Format>(to->v[i], from.v[i]);
  };
  if constexpr (Op::kTree) {
    static_assert(Op::kSticky, "NaN is looked for in the result");
    CombineTree(num_src, &acc, read, apply);
  } else {
    read(0, &acc);
    if constexpr (kFloats && !Op::kSticky) nan |= acc.HasNan();
    for (int k = 1; k < num_src; ++k) {
      read(k, &x);
      if constexpr (kFloats && !Op::kSticky) nan |= x.HasNan();
      apply(&acc, x);
    }
  }
  if constexpr (Op::kDivide) {
    Scalar divisor = static_cast<Scalar>(num_src);
    // Multiplication by an exact reciprocal gives the quotient, and is several times faster.
    bool power_of_two = (num_src & (num_src - 1)) == 0;
    Scalar factor = static_cast<Scalar>(1) / divisor;
    for (int i = 0; i < Block::kCount; ++i)
      acc.v[i] = power_of_two ? acc.v[i] * factor : acc.v[i] / divisor;
  }
  if constexpr (Op::kTruth) {
    for (int i = 0; i < Block::kCount; ++i) acc.v[i] = (typename Format::Vector)(acc.v[i] != 0) & 1;
  }
  if constexpr (Format::kNormalsOnly) {
    if (__builtin_expect(acc.HasUnusual(), 0)) {
      if (!acc.HasNan()) return StoreBlock<typename Format::Exact, kVectors>(job, at, part, acc.v);
      nan = true;
    }
  } else if constexpr (kFloats && Op::kSticky) {
    nan = acc.HasNan();
  }
  if constexpr (kFloats) {
    if (__builtin_expect(nan, 0)) {
      size_t bytes = part != 0 ? part : kVectors * kVector;
      ReduceCarefully<Format, Op>(job.dst, job.src, num_src, at, at + bytes);
      return;
    }
  }
  StoreBlock<Format, kVectors>(job, at, part, acc.v);
}

/*!
 * \brief Reduce the bytes from `at` to `end`: the few before and after those that are done four
 *        vectors at a time.
 *
 * One function handles any number of sources, because inlined it would be most of the code to
 * compile. It takes its own copy of the job: the caller's stays in registers only if its address is
 * never taken.
 */
template <typename Format, typename Op>
__attribute__((noinline)) void ReduceFew(Job job, size_t at, size_t end) {
  for (; at + kVector <= end; at += kVector) Step<Format, Op, 1, 0>(job, at, 0);
  if (at < end) Step<Format, Op, 1, 0>(job, at, end - at);
}

template <typename Format, typename Op, int kSources>
void Run(void* dst, const void* const* src, int num_src, size_t count, bool stream) {
  constexpr size_t kElement = sizeof(typename Format::Element);
  size_t bytes = count * kElement;
  Job job;
  job.dst = static_cast<char*>(dst);
  job.src = src;
  job.num_src = num_src;
  job.first = static_cast<const char*>(src[0]);
  job.second = static_cast<const char*>(src[num_src > 1 ? 1 : 0]);
  job.bytes = bytes;
  job.stream = false;
  size_t at = 0;
  size_t to_line = (0 - reinterpret_cast<uintptr_t>(dst)) % kLine;
  if (stream && Isa::kHasStream && to_line % kElement == 0 && bytes >= to_line + kLine) {
    ReduceFew<Format, Op>(job, 0, to_line);
    at = to_line;
    job.stream = true;
  }
  for (; at + kUnroll * kVector <= bytes; at += kUnroll * kVector)
    Step<Format, Op, kUnroll, kSources>(job, at, 0);
  if (at < bytes) ReduceFew<Format, Op>(job, at, bytes);
  if (job.stream) Isa::Fence();
}

template <typename Format, typename Op>
void Reduce(void* dst, const void* const* src, int num_src, size_t count, bool stream) {
  if (count == 0 || num_src < 1) return;
  if constexpr (Op::kTree) {
    // A tree of three sources or fewer has the order of a sum.
    if (num_src < 4) return Reduce<Format, Sum>(dst, src, num_src, count, stream);
    if (num_src == 4) return Run<Format, Op, 4>(dst, src, num_src, count, stream);
  } else if constexpr (Op::kOften) {
    if (num_src == 2) return Run<Format, Op, 2>(dst, src, num_src, count, stream);
  }
  Run<Format, Op, 0>(dst, src, num_src, count, stream);
}

/*! \brief Copy two lines or more. The C library's memcpy does not prefetch, and streams only larger
 *         copies. */
template <bool kStream>
TVM_IPC_INLINE void CopyLong(char* to, const char* from, size_t bytes) {
  constexpr size_t kVectors = kLine / kVector;
  size_t at = (0 - reinterpret_cast<uintptr_t>(to)) % kLine;
  if (at != 0) __builtin_memcpy(to, from, at);
  for (; at + kLine <= bytes; at += kLine) {
    if (at + kAhead + kLine <= bytes) Prefetch<kLine>(from + at);
    Raw v[kVectors];
    for (size_t i = 0; i < kVectors; ++i) v[i] = Load(from + at + i * kVector);
    for (size_t i = 0; i < kVectors; ++i) Store<kStream>(to + at + i * kVector, v[i]);
    KeepOrder();
  }
  if (at < bytes) __builtin_memcpy(to + at, from + at, bytes - at);
  if (kStream) Isa::Fence();
}

inline void Copy(void* dst, const void* src, size_t bytes, bool stream) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  if (bytes == 0) return;
  if (Isa::kHasStream && stream && bytes >= 2 * kLine) {
    CopyLong<true>(to, from, bytes);
  } else if (Isa::kHasStream && bytes >= kLongCopy) {
    CopyLong<false>(to, from, bytes);
  } else {
    __builtin_memcpy(to, from, bytes);
  }
}

template <typename Format>
constexpr ReduceRow FloatRow() {
  return {{Reduce<Format, Sum>, Reduce<Format, Product>, Reduce<Format, Minimum>,
           Reduce<Format, Maximum>, Reduce<Format, Average>, nullptr, nullptr, nullptr,
           Reduce<Format, TreeSum>}};
}

// Signed sums, products and bitwise operations have the same bits as unsigned ones, whose overflow
// is defined.
template <typename T, typename Unsigned, ReduceFn kAverage>
constexpr ReduceRow IntegerRow() {
  return {{Reduce<Native<Unsigned>, Sum>, Reduce<Native<Unsigned>, Product>,
           Reduce<Native<T>, Minimum>, Reduce<Native<T>, Maximum>, kAverage,
           Reduce<Native<Unsigned>, BitwiseAnd>, Reduce<Native<Unsigned>, BitwiseOr>,
           Reduce<Native<Unsigned>, BitwiseXor>, Reduce<Native<Unsigned>, Sum>}};
}

constexpr ReduceRow TruthRow() {
  using Bytes = Native<uint8_t>;
  return {{Reduce<Bytes, Any>, Reduce<Bytes, All>, Reduce<Bytes, All>, Reduce<Bytes, Any>, nullptr,
           nullptr, nullptr, nullptr, Reduce<Bytes, Any>}};
}

/*! \brief Return the table, with its rows in the order of ReduceType. */
constexpr ReduceTable MakeTable(const char* name) {
  return {name,
          {FloatRow<Float16>(), FloatRow<BFloat16>(), FloatRow<Float32>(), FloatRow<Float64>(),
           IntegerRow<int8_t, uint8_t, AverageIntegers<int8_t, int32_t>>(),
           IntegerRow<uint8_t, uint8_t, AverageIntegers<uint8_t, int32_t>>(),
           IntegerRow<int16_t, uint16_t, AverageIntegers<int16_t, int32_t>>(),
           IntegerRow<uint16_t, uint16_t, AverageIntegers<uint16_t, int32_t>>(),
           IntegerRow<int32_t, uint32_t, AverageIntegers<int32_t, int64_t>>(),
           IntegerRow<uint32_t, uint32_t, AverageIntegers<uint32_t, int64_t>>(),
           IntegerRow<int64_t, uint64_t, AverageWords<int64_t>>(),
           IntegerRow<uint64_t, uint64_t, AverageWords<uint64_t>>(), TruthRow()},
          Copy,
          {NormsOf<Float16>(), NormsOf<BFloat16>(), NormsOf<Float32>()}};
}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_REDUCE_IMPL_H_
