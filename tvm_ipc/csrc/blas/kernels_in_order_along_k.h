/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernels_in_order_along_k.h
 * \brief Matmuls of few rows with weights that are contiguous along k, whose sums have the order of
 *        kernels_float32_packed.h; part of kernel_table_of_instruction_set.h for instruction sets
 *        with wide vectors.
 *
 * Each lane adds up a column of its own, so no addition crosses lanes. The kernels load a few words
 * of kLanes columns, transpose them in registers, and multiply them by elements of x: 16-bit
 * weights in pairs, which are widened after they are transposed. The columns of the lanes are far
 * apart, so that each lane reads its columns as one long stream, which the processor can predict.
 *
 * An addition waits for the previous one of its sum. So several runs of a stream are computed in
 * turn: blocks of steps whose sums are added afterwards.
 */
#ifndef TVM_IPC_BLAS_KERNELS_IN_ORDER_ALONG_K_H_
#define TVM_IPC_BLAS_KERNELS_IN_ORDER_ALONG_K_H_

#include "blas/kernels_float_conversion.h"

namespace tvm_ipc {
namespace {

/*! \brief The least prefetch distance of each stream, in bytes. */
constexpr int64_t kInOrderAhead = 512;

/*! \brief Words of each column that Isa::LoadFourWords loads. */
constexpr int kLoadWords = 4;

/*! \brief Weights of one type, in words of 32 bits. */
template <FloatType type>
struct WordsOf {
  static constexpr int64_t kSize = Format<type>::kSize;
  static constexpr int kPerWord = 4 / kSize;
  /*! \brief Steps of k that are loaded at once. */
  static constexpr int kSteps = kLoadWords * kPerWord;

  static TVM_IPC_INLINE void Widen(Words words, Floats* to) {
    if constexpr (type == kFloat32) {
      to[0] = (Floats)words;
    } else if constexpr (type == kBFloat16) {
      to[0] = (Floats)(words << 16);
      to[1] = (Floats)(words & 0xffff0000u);
    } else {
      Isa::WidenHalves((Isa::U32)words, to, to + 1);
    }
  }
};

/*! \brief Steps of k whose products are added up in order, from +0 on. */
struct InOrderRun {
  const char* w;   // weights of the first lane
  const float* x;  // elements of the first row
  int64_t steps;
  int64_t before;  // steps of k before the run
  int64_t part;    // that the run is in, and where it begins there
  int64_t begin;
  int64_t column;
};

/*! \brief Add the products of the steps [begin, end), a multiple of WordsOf::kSteps, of several
 *         runs; prefetch cache lines from `ahead` on meanwhile, unless it is nullptr. */
template <FloatType type, int kRows, int kRuns>
TVM_IPC_INLINE void AddRuns(const InOrderRun* runs, int64_t lane, int64_t ldx, int64_t begin,
                            int64_t end, const char* ahead, Floats (*to)[kRows]) {
  using Weight = WordsOf<type>;
  constexpr int kPerWord = Weight::kPerWord;
  Floats sums[kRuns][kRows];
  const char* w[kRuns];
  const float* x[kRuns];
#pragma GCC unroll 8
  for (int c = 0; c < kRuns; ++c) {
    w[c] = runs[c].w;
    x[c] = runs[c].x;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums[c][r] = to[c][r];
  }
  for (int64_t i = begin; i < end; i += Weight::kSteps) {
    if (ahead != nullptr && i * Weight::kSize % 64 == 0) {
#pragma GCC unroll 8
      for (int c = 0; c < kRuns; ++c, ahead += 64) {
#pragma GCC unroll 16
        for (int64_t q = 0; q < kLanes; ++q) __builtin_prefetch(ahead + q * lane, 0, 2);
      }
    }
#pragma GCC unroll 8
    for (int c = 0; c < kRuns; ++c) {
      Words words[kLoadWords];
      Isa::LoadFourWords(w[c] + i * Weight::kSize, lane, words);
#pragma GCC unroll 4
      for (int q = 0; q < kLoadWords; ++q) {
        Floats weights[kPerWord];
        Weight::Widen(words[q], weights);
#pragma GCC unroll 2
        for (int h = 0; h < kPerWord; ++h) {
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const Floats of_x = Splat(x[c][r * ldx + i + q * kPerWord + h]);
            sums[c][r] = Isa::Fma(of_x, weights[h], sums[c][r]);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < kRuns; ++c) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) to[c][r] = sums[c][r];
  }
}

/*! \brief Add the products of the last steps of a run, fewer than WordsOf::kSteps. */
template <FloatType type, int kRows>
void AddRest(const InOrderRun& run, int64_t lane, int64_t ldx, int64_t rest, Floats* sums) {
  using Weight = WordsOf<type>;
  constexpr int64_t kBytes = 4 * kLoadWords;
  const char* end = run.w + run.steps * Weight::kSize;
  Words words[kLoadWords];
  if (run.before + run.steps >= Weight::kSteps) {
    Isa::LoadFourWords(end - kBytes, lane, words);
  } else {
    const int64_t bytes = (run.before + run.steps) * Weight::kSize;
    char copy[kLanes][kBytes] = {};
    for (int64_t q = 0; q < kLanes; ++q) {
      __builtin_memcpy(copy[q] + kBytes - bytes, end - bytes + q * lane, bytes);
    }
    Isa::LoadFourWords(copy[0], kBytes, words);
  }
  Floats weights[Weight::kSteps];
#pragma GCC unroll 4
  for (int q = 0; q < kLoadWords; ++q) Weight::Widen(words[q], weights + q * Weight::kPerWord);
  for (int64_t i = run.steps - rest, q = Weight::kSteps - rest; i < run.steps; ++i, ++q) {
    for (int r = 0; r < kRows; ++r) {
      sums[r] = Isa::Fma(Splat(run.x[r * ldx + i]), weights[q], sums[r]);
    }
  }
}

/*! \brief The columns of a call: `count` for each lane. */
template <FloatType type, int kRows>
struct InOrderColumns {
  using Weight = WordsOf<type>;
  static constexpr int kRuns = kRows == 1 ? 4 : kRows < 4 ? 2 : 1;

  const float* x;
  int64_t ldx;
  Weights weights;
  const Parts& parts;
  int64_t count;
  float* y;
  int64_t ldy;

  void Run() const {
    const int64_t stride = weights.ld * Weight::kSize, lane = count * stride;
    const int64_t runs_of_part = (parts.size + kPackedDepth - 1) / kPackedDepth;
    InOrderRun next{weights.data, x, 0, 0, 0, 0, 0};
    Floats of_part[kRows] = {};
    auto start = [&]() {
      InOrderRun run = next;
      run.before = run.part * parts.size + run.begin;
      run.w = weights.data + run.column * stride + run.before * Weight::kSize;
      run.x = x + run.before;
      run.steps = parts.size - run.begin < kPackedDepth ? parts.size - run.begin : kPackedDepth;
      next.begin += kPackedDepth;
      if (next.begin >= parts.size) {
        next.begin = 0;
        if (++next.part == parts.count) {
          next.part = 0;
          ++next.column;
        }
      }
      return run;
    };
    int64_t rest = count * parts.count * runs_of_part;
    for (; rest >= kRuns; rest -= kRuns) {
      InOrderRun runs[kRuns];
      Floats sums[kRuns][kRows] = {};
      int64_t least = kPackedDepth;
#pragma GCC unroll 8
      for (int c = 0; c < kRuns; ++c) {
        runs[c] = start();
        if (runs[c].steps < least) least = runs[c].steps;
      }
      least = least / Weight::kSteps * Weight::kSteps;
      const char* ahead = runs[kRuns - 1].w + runs[kRuns - 1].steps * Weight::kSize;
      if (ahead < runs[0].w + kInOrderAhead) ahead = runs[0].w + kInOrderAhead;
      AddRuns<type, kRows, kRuns>(runs, lane, ldx, 0, least, ahead, sums);
#pragma GCC unroll 8
      for (int c = 0; c < kRuns; ++c) {
        if (runs[c].steps > least) AddOthers(runs[c], lane, least, sums[c]);
        Finish(runs[c], sums[c], of_part);
      }
    }
    if constexpr (kRuns > 1) {
      for (; rest > 0; --rest) {
        const InOrderRun run = start();
        Floats sums[kRows] = {};
        AddOthers(run, lane, 0, sums);
        Finish(run, sums, of_part);
      }
    }
  }

  __attribute__((noinline)) void AddOthers(const InOrderRun& run, int64_t lane, int64_t begin,
                                           Floats* sums) const {
    const int64_t end = run.steps / Weight::kSteps * Weight::kSteps;
    AddRuns<type, kRows, 1>(&run, lane, ldx, begin, end, nullptr, (Floats(*)[kRows])sums);
    if (end < run.steps) AddRest<type, kRows>(run, lane, ldx, run.steps - end, sums);
  }

  /*! \brief Add the sums of a run to those of its part, these to the tree, and store its root. */
  TVM_IPC_INLINE void Finish(const InOrderRun& run, const Floats* sums, Floats* of_part) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) of_part[r] = run.begin == 0 ? sums[r] : of_part[r] + sums[r];
    if (run.begin + run.steps < parts.size) return;
    float* level = parts.levels;
    for (int64_t part = run.part; part & 1; part >>= 1, level += kLevelFloats) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        of_part[r] += Format<kFloat32>::Load((const char*)(level + r * kLanes));
      }
    }
    if (run.part + 1 < parts.count) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        Format<kFloat32>::Store((char*)(level + r * kLanes), of_part[r]);
      }
      return;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int64_t q = 0; q < kLanes; ++q) y[r * ldy + q * count + run.column] = of_part[r][q];
    }
  }
};

template <FloatType type, int kRows>
void InOrder(const float* x, int64_t ldx, Weights weights, const Parts& parts, int64_t n, float* y,
             int64_t ldy) {
  static_assert(kRows * kLanes <= kLevelFloats, "a level has a vector for each row");
  const int64_t count = n / kLanes;
  InOrderColumns<type, kRows>{x, ldx, weights, parts, count, y, ldy}.Run();
  if (count * kLanes == n) return;
  // The last columns, some of them once more.
  const int64_t j = n - kLanes;
  weights.data += j * weights.ld * Format<type>::kSize;
  InOrderColumns<type, kRows>{x, ldx, weights, parts, 1, y + j, ldy}.Run();
}

#define TVM_IPC_IN_ORDER(type)                                             \
  {InOrder<type, 1>, InOrder<type, 2>, InOrder<type, 3>, InOrder<type, 4>, \
   InOrder<type, 5>, InOrder<type, 6>, InOrder<type, 7>, InOrder<type, 8>}

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_KERNELS_IN_ORDER_ALONG_K_H_
