/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_matmul_order.cc
 * \brief Matmuls whose sums have a fixed order (Product::parts): the bits of every kernel are those
 *        of a loop with std::fmaf, whatever the number of rows, columns and threads. With
 *        `--threads` only what several threads do.
 */
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "blas/matmul_multi_thread.h"
#include "blas/run_matmul_piece.h"
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
      Set(i, value);
    }
  }
  void Set(int64_t i, float value) {
    elements.values[i] = value;
    if (std::isfinite(value)) return elements.Set(i, value);
    // Elements::Set takes no infinities and NaNs in float16.
    const uint32_t bits = Bits(value);
    const uint16_t half = elements.type == kFloat16
                              ? static_cast<uint16_t>(0x7c00 | (std::isnan(value) ? 0x200 : 0))
                              : static_cast<uint16_t>(bits >> 16);
    if (elements.type == kFloat32) std::memcpy(data() + i * 4, &bits, 4);
    if (elements.type != kFloat32) std::memcpy(data() + i * 2, &half, 2);
  }
  char* data() { return elements.memory.data(); }
  float operator[](int64_t i) const { return static_cast<float>(elements.values[i]); }
};

/*! \brief Return the sum of the steps [begin, end): four lanes, each with two neighbours of eight
 *         steps, and a tree of these. Zeros follow the last step. */
template <typename Product>
float SumOfPart(int64_t begin, int64_t end, Product product) {
  float lanes[4] = {};
  for (int64_t group = begin; group < end; group += 8) {
    for (int64_t p = group; p < group + 8; ++p) {
      float& sum = lanes[(p - group) / 2];
      sum = p < end ? product(p, sum) : std::fmaf(0.0f, 0.0f, sum);
    }
  }
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
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

/*! \brief A matrix, and its transpose. */
struct Layouts {
  int64_t rows, cols;
  Operand plain, turned;

  Layouts(FloatType type, int64_t rows, int64_t cols, int seed)
      : rows(rows), cols(cols), plain(type, rows * cols, seed), turned(type, rows * cols, seed) {
    const int64_t size = SizeOf(type);
    for (int64_t i = 0; i < rows * cols; ++i) {
      const int64_t to = i % cols * rows + i / cols;
      turned.elements.values[to] = plain.elements.values[i];
      std::memcpy(turned.data() + to * size, plain.data() + i * size, size);
    }
  }
  float At(int64_t i, int64_t j) const { return plain[i * cols + j]; }
  void Set(int64_t i, int64_t j, float value) {
    plain.Set(i * cols + j, value);
    turned.Set(j * rows + i, value);
  }
  MatrixBatch View(bool turn) {
    return MatrixBatch{turn ? turned.data() : plain.data(), turn ? 1 : cols, turn ? rows : 1, {}};
  }
};

/*! \brief The operands of a matmul, and its sums by plain loops. */
struct Case {
  FloatType type;
  Shape shape;
  Layouts a, b;
  std::vector<float> expected;

  Case(FloatType type, const Shape& shape)
      : type(type), shape(shape), a(type, shape.m, shape.k, 1), b(type, shape.k, shape.n, 2) {
    Expect();
  }

  void Expect() {
    const auto [m, k, n, parts] = shape;
    expected.resize(m * n);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        expected[i * n + j] = SumOfParts(0, parts, k / parts, [&](int64_t p, float sum) {
          return std::fmaf(a.At(i, p), b.At(p, j), sum);
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
    p.a = a.View(turn_a);
    p.b = b.View(turn_b);
    p.b.data += col * p.b.col_stride * SizeOf(type);
    p.target = target.memory.data();
    Multiply(kNoLibrary, &p, Threads{NumberOfThreads, RunThreads});
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        const float found = static_cast<float>(target.Get(i * cols + j));
        const float right = expected[i * n + col + j];
        EXPECT(std::isnan(right) ? std::isnan(found) : Bits(found) == Bits(right),
               BlasInstructionSet(), " type ", static_cast<int>(type), ", ", rows, " of ", m, "x",
               k, "x", n, ", ", parts, " parts, columns from ", col, ", turned ", turn_a, turn_b,
               ", threads ", threads_of_test, " at ", i, ", ", j, ": ", found, ", not ", right);
      }
    }
  }
};

/*! \brief Call `check` with each set of kernels that this machine has. */
template <typename Function>
void ForAllKernels(Function check) {
  static const std::vector<std::string> names = InstructionSetsHere();
  for (const std::string& name : names) {
    if (UseBlasInstructionSet(name.c_str()) && OrdersSums()) check();
  }
}

void CheckOrder(FloatType type, const Shape& shape) {
  Case test(type, shape);
  const int64_t m = shape.m, n = shape.n;
  ForAllKernels([&]() {
    for (int turned = 0; turned < 4; ++turned) {
      const bool turn_a = turned & 1, turn_b = turned & 2;
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
  });
}

/*! \brief Check matmuls with enough work for threads, with the kernels of this machine. */
void CheckThreads(FloatType type, const Shape& shape) {
  Case test(type, shape);
  threads_of_test = 4;
  for (bool turned : {false, true}) test.Check(shape.m, 0, shape.n, turned, turned);
}

/*! \brief Check sums that are zeros of either sign, and products that are too small. */
void CheckZeros(FloatType type, float tiny, int64_t k) {
  for (int64_t parts : {1, 2, 4}) {
    for (int64_t m : {1, 3, 5, 40}) {
      Case test(type, {m, k, 70, parts});
      for (int64_t i = 0; i < m * k; ++i) test.a.Set(i / k, i % k, tiny);
      for (int64_t i = 0; i < k * 70; ++i) {
        // -2^-160 rounds to -0, also if it is added to +0. The products of 0 and -0.5 do not.
        const float size = tiny == 0 ? 0.5f : tiny;
        test.b.Set(i / 70, i % 70, i % 50 == 0 ? size : -size);
      }
      test.Expect();
      ForAllKernels([&]() {
        for (bool turned : {false, true}) test.Check(m, 0, 70, false, turned);
      });
    }
  }
}

/*! \brief Check that infinities and NaNs stay in their rows and columns. */
void CheckSpecial(FloatType type) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (int64_t m : {1, 4, 7, 40}) {
    const int64_t k = 12, n = 70;
    Case test(type, {m, k, n, 4});
    test.a.Set(m - 1, 5, infinity);
    test.b.Set(11, 3, infinity);
    test.b.Set(0, 66, std::nanf(""));
    test.Expect();
    ForAllKernels([&]() {
      for (bool turned : {false, true}) test.Check(m, 0, n, false, turned);
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Shape with_threads[] = {
      // By rows, by columns.
      {129, 512, 300, 8},
      {65, 2048, 300, 16},
      {1, 2048, 1500, 16},
      {700, 256, 70, 2},
  };
  const FloatType types[] = {kFloat16, kBFloat16, kFloat32};
  if (argc > 1 && std::string(argv[1]) == "--threads") {
    if (!OrdersSums()) return 0;
    for (FloatType type : types) {
      for (const Shape& shape : with_threads) CheckThreads(type, shape);
    }
    return 0;
  }
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
  };
  for (FloatType type : types) {
    for (const Shape& shape : shapes) CheckOrder(type, shape);
    for (const Shape& shape : with_threads) CheckOrder(type, shape);
    // With 24 and 60 steps, the zeros after those of a part are added to sums that are -0.
    for (int64_t k : {8, 24, 60}) {
      if (type != kFloat16) CheckZeros(type, std::ldexp(1.0f, -80), k);
      CheckZeros(type, 0, k);
    }
    CheckSpecial(type);
  }
  EXPECT(UseBlasInstructionSet("portable") && !OrdersSums(),
         "the portable kernels are not in order");
  return 0;
}
