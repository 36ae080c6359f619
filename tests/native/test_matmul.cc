/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_matmul.cc
 * \brief Products in memory with guards around it: a plain loop in the place of the BLAS, every
 *        kernel beside it, every layout, pieces for threads; with `--threads` these alone. For the
 *        sanitizers; what the real BLAS gives is tested from Python.
 */
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "blas/matmul_multi_thread.h"
#include "blas/select_instruction_set.h"
#include "expect.h"
#include "float_elements.h"
using namespace tvm_ipc;

namespace {

template <typename T>
void PlainGemm(int, int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k, T,
               const T* a, int64_t lda, const T* b, int64_t ldb, T beta, T* c, int64_t ldc) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      T sum = beta == 0 ? T(0) : c[i * ldc + j];
      for (int64_t p = 0; p < k; ++p) {
        sum += (transpose_a == BlasLibrary::kPlain ? a[i * lda + p] : a[p * lda + i]) *
               (transpose_b == BlasLibrary::kPlain ? b[p * ldb + j] : b[j * ldb + p]);
      }
      c[i * ldc + j] = sum;
    }
  }
}

void PlainGemv(int, int transpose, int64_t m, int64_t n, double, const double* a, int64_t lda,
               const double* x, int64_t incx, double, double* y, int64_t incy) {
  const bool plain = transpose == BlasLibrary::kPlain;
  for (int64_t i = 0; i < (plain ? m : n); ++i) {
    double sum = 0;
    for (int64_t p = 0; p < (plain ? n : m); ++p) {
      sum += (plain ? a[i * lda + p] : a[p * lda + i]) * x[p * incx];
    }
    y[i * incy] = sum;
  }
}

const BlasLibrary kPlain{PlainGemm<float>, PlainGemm<double>, PlainGemv, "a loop"};

void CheckProduct(FloatType type, int64_t batch, int64_t m, int64_t k, int64_t n, bool turn_a,
                  bool turn_b) {
  const FloatType out = type == kFloat64 ? kFloat64 : kFloat32;
  Elements a(type, batch * m * k, 1), b(type, batch * k * n, 2), bias(type, n, 3);
  Elements target(out, batch * m * n, 4);
  Product p{};
  p.type = type;
  p.target_type = out;
  p.m = m;
  p.n = n;
  p.k = k;
  p.batch_dims = 1;
  p.batch[0] = batch;
  p.a = MatrixBatch{a.memory.data(), turn_a ? 1 : k, turn_a ? m : 1, {m * k}};
  p.b = MatrixBatch{b.memory.data(), turn_b ? 1 : n, turn_b ? k : 1, {k * n}};
  p.target = target.memory.data();
  p.num_steps = 2;
  p.steps[0] = Step{kStepAdd, type, nullptr, 0, 0};
  p.operands[0] = MatrixBatch{bias.memory.data(), 0, 1, {0}};
  p.steps[1] = Step{kStepRelu, type, nullptr, 0, 0};
  const MatrixBatch view_a = p.a, view_b = p.b;
  Multiply(kPlain, &p, Threads{ThreeThreads, RunThreads});
  for (int64_t x = 0; x < batch; ++x) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = bias.values[j];
        for (int64_t q = 0; q < k; ++q) {
          sum += a.values[x * m * k + i * view_a.row_stride + q * view_a.col_stride] *
                 b.values[x * k * n + q * view_b.row_stride + j * view_b.col_stride];
        }
        const int64_t at = (x * m + i) * n + j;
        const double found = target.Get(at);
        // Sums of sixteenths: exact in float32.
        EXPECT(found == std::fmax(sum, 0.0), BlasInstructionSet(), " type ", static_cast<int>(type),
               ", ", m, "x", k, "x", n, " at ", x, ", ", i, ", ", j, ": ", found);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  // Only what several threads do, with the kernels of this machine and the portable ones.
  const bool threads = argc > 1 && std::string(argv[1]) == "--threads";
  const int64_t shapes[][3] = {{1, 1, 1},     {1, 33, 70},   {3, 17, 5},    {5, 40, 33},
                               {8, 9, 64},    {17, 31, 3},   {33, 65, 31},  {40, 600, 1},
                               {1, 70, 300},  {66, 33, 290}, {2, 0, 3},     {0, 3, 3},
                               {520, 20, 20}, {3, 4500, 9},  {1, 9000, 17}, {33, 4200, 5},
                               {47, 300, 65}, {14, 600, 40}, {37, 30, 1100}};
  const std::vector<std::string> names = InstructionSetsHere(threads);
  for (const std::string& name : names) {
    UseBlasInstructionSet(name.c_str());
    for (FloatType type : {kFloat16, kBFloat16, kFloat32, kFloat64}) {
      for (const auto& shape : shapes) {
        if (threads) break;
        for (int turned = 0; turned < 4; ++turned) {
          CheckProduct(type, 2, shape[0], shape[1], shape[2], turned & 1, turned & 2);
        }
      }
      // Enough work for threads: by places, by rows, by columns.
      CheckProduct(type, 12, 70, 300, 70, false, true);
      CheckProduct(type, 1, 700, 130, 97, true, false);
      CheckProduct(type, 1, 97, 130, 700, false, false);
      // More rows, and more steps of k, than are packed at once.
      CheckProduct(type, 1, 600, 130, 700, true, true);
      CheckProduct(type, 1, 70, 600, 300, false, true);
    }
  }
  std::printf("%zu kinds of kernels\n", names.size());
  return names.empty();
}
