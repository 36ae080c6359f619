/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_matmul_order.cc
 * \brief Matmuls whose sums have a fixed order (Product::parts): the bits of every kernel are those
 *        of a loop with std::fmaf, whatever the number of rows, columns and threads.
 */
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "blas/matmul_multi_thread.h"
#include "blas/select_instruction_set.h"
#include "expect.h"
#include "float_elements.h"
using namespace tvm_ipc;

namespace {

const BlasLibrary kNoLibrary{};  // no kernel of it is called

int threads_of_test = 1;
int NumberOfThreads() { return threads_of_test; }

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

/*! \brief Elements of all magnitudes, so that sums in another order have other bits. */
struct Operand {
  Elements elements;

  Operand(FloatType type, int64_t count, int seed) : elements(type, count, seed) {
    std::mt19937 random(seed);
    for (int64_t i = 0; i < count; ++i) {
      uint32_t bits = random();
      // Normal numbers between 1/32 and 4; float16 has the fewest bits.
      bits = (bits & 0x80000000u) | ((122 + bits % 7) << 23) | (bits & 0x7fffffu);
      if (type != kFloat32) bits &= type == kFloat16 ? 0xffffe000u : 0xffff0000u;
      float value;
      std::memcpy(&value, &bits, 4);
      elements.values[i] = value;
      elements.Set(i, value);
    }
  }
  char* data() { return elements.memory.data(); }
  float operator[](int64_t i) const { return static_cast<float>(elements.values[i]); }
};

/*! \brief Return the sum of the steps [begin, end): eight lanes, and a tree of these. Zeros
 *         follow the last step. */
template <typename Product>
float SumOfPart(int64_t begin, int64_t end, Product product) {
  float lanes[8] = {};
  for (int64_t p = begin; p < end; p += 8) {
    for (int64_t lane = 0; lane < 8; ++lane) {
      float& sum = lanes[lane];
      sum = p + lane < end ? product(p + lane, sum) : std::fmaf(0.0f, 0.0f, sum);
    }
  }
  const float even = (lanes[0] + lanes[4]) + (lanes[2] + lanes[6]);
  return even + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

/*! \brief Return the sum of the parts [first, first + count), half of them after the others. */
template <typename Product>
float SumOfParts(int64_t first, int64_t count, int64_t size, Product product) {
  if (count == 1) return SumOfPart(first * size, (first + 1) * size, product);
  const float left = SumOfParts(first, count / 2, size, product);
  return left + SumOfParts(first + count / 2, count / 2, size, product);
}

struct Shape {
  int64_t m, k, n, parts;
};

/*! \brief The operands of a matmul, the layouts of both, and its sums by plain loops. */
struct Case {
  FloatType type;
  Shape shape;
  Operand a, b;
  std::vector<float> expected;

  Case(FloatType type, const Shape& shape)
      : type(type), shape(shape), a(type, shape.m * shape.k, 1), b(type, shape.k * shape.n, 2) {}

  void Expect(bool turn_a, bool turn_b) {
    const auto [m, k, n, parts] = shape;
    expected.resize(m * n);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        expected[i * n + j] = SumOfParts(0, parts, k / parts, [&](int64_t p, float sum) {
          return std::fmaf(a[turn_a ? p * m + i : i * k + p], b[turn_b ? j * k + p : p * n + j],
                           sum);
        });
      }
    }
  }

  /*! \brief Multiply the first `rows` rows and the columns [col, col + cols), and compare. */
  void Check(int64_t rows, int64_t col, int64_t cols, bool turn_a, bool turn_b) {
    const auto [m, k, n, parts] = shape;
    Elements target(kFloat32, rows * cols, 4);
    Product p{};
    p.type = type;
    p.target_type = kFloat32;
    p.m = rows;
    p.n = cols;
    p.k = k;
    p.parts = parts;
    const int64_t size = SizeOf(type);
    p.a = MatrixBatch{a.data(), turn_a ? 1 : k, turn_a ? m : 1, {}};
    p.b = MatrixBatch{b.data() + col * (turn_b ? k : 1) * size, turn_b ? 1 : n, turn_b ? k : 1, {}};
    p.target = target.memory.data();
    Multiply(kNoLibrary, &p, Threads{NumberOfThreads, RunThreads});
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        const float found = static_cast<float>(target.Get(i * cols + j));
        const float right = expected[i * n + col + j];
        EXPECT(Bits(found) == Bits(right), BlasInstructionSet(), " type ", static_cast<int>(type),
               ", ", rows, " of ", m, "x", k, "x", n, ", ", parts, " parts, columns from ", col,
               ", turned ", turn_a, turn_b, ", threads ", threads_of_test, " at ", i, ", ", j, ": ",
               found, ", not ", right);
      }
    }
  }
};

void CheckOrder(FloatType type, const Shape& shape) {
  Case test(type, shape);
  const int64_t m = shape.m, n = shape.n;
  for (int turned = 0; turned < 4; ++turned) {
    const bool turn_a = turned & 1, turn_b = turned & 2;
    test.Expect(turn_a, turn_b);
    for (threads_of_test = 1; threads_of_test <= 4; threads_of_test += 3) {
      test.Check(m, 0, n, turn_a, turn_b);
    }
    threads_of_test = 1;
    // A row and a column do not depend on the others.
    for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 32}) {
      if (rows < m) test.Check(rows, 0, n, turn_a, turn_b);
    }
    if (n > 3) test.Check(m, 1, n - 2, turn_a, turn_b);
    if (n > 40) test.Check(1, 33, n - 40, turn_a, turn_b);
  }
}

/*! \brief Check sums that are zeros of either sign, and products that are too small. */
void CheckZeros(FloatType type, double tiny, int64_t k) {
  for (int64_t parts : {1, 2, 4}) {
    for (int64_t m : {1, 3, 5, 40}) {
      Case test(type, {m, k, 70, parts});
      for (int64_t i = 0; i < m * k; ++i) test.a.elements.Set(i, test.a.elements.values[i] = tiny);
      for (int64_t i = 0; i < k * 70; ++i) {
        // -2^-160 rounds to -0, also if it is added to +0. The products of 0 and -0.5 do not.
        const double size = tiny == 0 ? 0.5 : tiny;
        test.b.elements.Set(i, test.b.elements.values[i] = i % 50 == 0 ? size : -size);
      }
      for (bool turned : {false, true}) {
        test.Expect(false, turned);
        test.Check(m, 0, 70, false, turned);
      }
    }
  }
}

/*! \brief Check that infinities and NaNs stay in their rows and columns. */
void CheckSpecial(FloatType type) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (int64_t m : {1, 4, 7, 40}) {
    const int64_t k = 12, n = 70;
    for (bool turned : {false, true}) {
      Case test(type, {m, k, n, 4});
      auto set = [](Operand* x, int64_t i, float value) {
        x->elements.values[i] = value;
        uint32_t bits = Bits(value);
        uint16_t half = x->elements.type == kFloat16 ? 0x7c00 | (std::isnan(value) ? 0x200 : 0)
                                                     : static_cast<uint16_t>(bits >> 16);
        if (x->elements.type == kFloat32) std::memcpy(x->data() + i * 4, &bits, 4);
        if (x->elements.type != kFloat32) std::memcpy(x->data() + i * 2, &half, 2);
      };
      set(&test.a, (m - 1) * k + 5, infinity);
      set(&test.b, turned ? 3 * k + 11 : 11 * n + 3, infinity);
      set(&test.b, turned ? 66 * k : 66, std::nanf(""));
      test.Expect(false, turned);
      Elements target(kFloat32, m * n, 4);
      Product p{};
      p.type = type;
      p.target_type = kFloat32;
      p.m = m;
      p.n = n;
      p.k = k;
      p.parts = 4;
      p.a = MatrixBatch{test.a.data(), k, 1, {}};
      p.b = MatrixBatch{test.b.data(), turned ? 1 : n, turned ? k : 1, {}};
      p.target = target.memory.data();
      Multiply(kNoLibrary, &p, Threads{NumberOfThreads, RunThreads});
      for (int64_t i = 0; i < m * n; ++i) {
        const float found = static_cast<float>(target.Get(i)), right = test.expected[i];
        EXPECT(std::isnan(right) ? std::isnan(found) : Bits(found) == Bits(right), m, " rows at ",
               i, ": ", found, ", not ", right);
      }
    }
  }
}

}  // namespace

int main() {
  const Shape shapes[] = {
      // One part.
      {1, 1, 1, 1},
      {9, 255, 33, 1},
      {40, 700, 70, 1},
      {5, 1100, 17, 1},
      // Parts of one step and more; several parts in a block, and one.
      {40, 64, 66, 64},
      {40, 96, 70, 32},
      {33, 1024, 80, 16},
      {9, 1024, 130, 4},
      {40, 1040, 72, 2},
      {12, 2240, 65, 8},
      {7, 4352, 40, 8},
      // Parts whose sizes are no multiple of the lanes.
      {40, 4, 37, 4},
      {40, 72, 37, 8},
      {18, 120, 66, 8},
      {9, 136, 100, 8},
      {6, 264, 129, 8},
      {5, 544, 70, 16},
      {16, 2056, 33, 8},
      // More rows than are packed at once, and columns than a block of few rows.
      {600, 96, 40, 4},
      {3, 40, 4500, 8},
      {2, 1032, 1100, 4},
      // Enough work for threads: by rows, by columns.
      {129, 512, 300, 8},
      {1, 2048, 1500, 16},
      {700, 256, 70, 2},
  };
  int kinds = 0;
  for (const char* kernels : {"auto", "avx512bf16", "avx512", "avx2"}) {
    if (!UseBlasInstructionSet(kernels) || !OrdersSums()) continue;
    ++kinds;
    for (FloatType type : {kFloat16, kBFloat16, kFloat32}) {
      for (const Shape& shape : shapes) CheckOrder(type, shape);
      // With 24 and 60 steps, the zeros after those of a part are added to sums that are -0.
      for (int64_t k : {8, 24, 60}) {
        if (type != kFloat16) CheckZeros(type, std::ldexp(1.0, -80), k);
        CheckZeros(type, 0, k);
      }
      CheckSpecial(type);
    }
  }
  EXPECT(UseBlasInstructionSet("portable") && !OrdersSums(),
         "the portable kernels are not in order");
  std::printf("%d kinds of kernels\n", kinds);
  return 0;
}
