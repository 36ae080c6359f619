/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file run_matmul_piece.cc
 * \brief Computes a piece of a matmul with the kernels of kernels_complementing_blas.h or the BLAS,
 * in blocks that stay in a cache.
 *
 * Memory bandwidth limits matmuls of few rows (a decoder's next token), because every weight is
 * used once per row. The kernels of kernels_axpy_along_n.h read each weight once for up to four
 * rows, and read 16-bit weights without widening them in memory. Other bfloat16 matmuls use tile
 * registers (bf16_matmul_amx.cc) where the processor has them, or vectors that multiply pairs
 * (bf16_matmul_avx512bf16.cc). kernels_float32_packed.h computes matmuls of more rows in float32;
 * it widens 16-bit floats while it packs them. The BLAS computes those in float64, and those for
 * instruction sets without these kernels: float32 in place, 16-bit floats in blocks that are
 * widened into scratch memory and summed over k there.
 */
#include "blas/run_matmul_piece.h"

#include <algorithm>
#include <cmath>

#include "blas/scratch_memory.h"
#include "blas/select_instruction_set.h"

namespace tvm_ipc {
namespace {

// The most rows for the few-row kernels. More than kSkinnyRows rows are computed in groups that use
// the same weights one after another, as many weights at a time as stay in a cache.
constexpr int64_t kFewRows = 8;
// The limit is lower for float32: the BLAS has kernels for small float32 matmuls. They read weights
// more than once.
constexpr int64_t kFewRowsFloat32 = 4;
constexpr int64_t kManyWeights = 1 << 17;
// Up to this many rows, reading weights in place is faster than the BLAS, which packs them, if they
// are contiguous along k.
constexpr int64_t kDotRows = 128;
// Where there are packed kernels, each dot product has to have this many steps of k for each row:
// it ends with additions across lanes, as packing ends after a number of rows.
constexpr int64_t kStepsPerDotRow = 16;
// Rows, columns and depth of the blocks of 16-bit operands that are widened at once.
constexpr int64_t kBlockRows = 512, kBlockCols = 512, kBlockDepth = 512;
// For matmuls in tiles: bytes of each operand that are packed at once, and the most columns of sums
// per block of rows. The L2 cache holds a packed part of b, by which every block of rows of a is
// multiplied; a is read once for each part.
constexpr int64_t kPackedBytesA = 16 << 20, kPackedBytesB = 1 << 20;
constexpr int64_t kPanelCols = 256;
// The most rows of float32 that are packed at once. b is packed again for the rows after them.
constexpr int64_t kPackedMostRows = 512;
// Columns after which steps are applied, a multiple of a panel: operands are read as longer lines.
constexpr int64_t kPackedFinishCols = 1024;
// Bytes of b, contiguous along n, that are read in place for any number of rows.
constexpr int64_t kPackedInPlaceBytes = 128 << 10;
// Steps of k that are summed in tile registers. Further partial sums are added outside of them,
// because the rounding error of a sum grows with the number of its terms.
constexpr int64_t kStretchSteps = 4096 / kTileStep;
// Bytes of a result after which its steps are applied, while it is still in the L2 cache. The BLAS
// reads b again for each block, so a block has at least kStepRows rows.
constexpr int64_t kStepBytes = 1 << 20;
constexpr int64_t kStepRows = 512;

thread_local Scratch scratch_a, scratch_b, scratch_c;

template <typename T>
void CallGemm(BlasLibrary::Gemm<T> gemm, const Matrix& a, const Matrix& b, T beta, T* c,
              int64_t ldc) {
  auto order = [](const Matrix& x) {
    return x.plain() ? BlasLibrary::kPlain : BlasLibrary::kTransposed;
  };
  gemm(BlasLibrary::kRowMajor, order(a), order(b), a.rows, b.cols, a.cols, T(1),
       reinterpret_cast<const T*>(a.data), a.ld(), reinterpret_cast<const T*>(b.data), b.ld(), beta,
       c, ldc);
}

/*! \brief A piece and the methods that compute it. */
struct PieceRunner : Piece {
  explicit PieceRunner(const Piece& piece) : Piece(piece) {}

  const BlasKernels& kernels = CurrentBlasKernels();
  const PackedKernels& packed = kernels.packed;
  const TileKernels* tiles = type == kBFloat16 ? CurrentTiles() : nullptr;
  const DotFn pair_dot = type == kBFloat16 ? CurrentPairDot() : nullptr;

  void Run() const {
    if (type == kFloat64) {
      Float64();
    } else if (a.cols == 0) {
      Nothing();
    } else if (HasFixedOrder()) {
      RunPieceInFixedOrder(*this);
    } else if (InPlace()) {
      FewRows();
    } else if (UsesTiles()) {
      InTiles();
    } else if (packed.rows > 0) {
      Packed();
    } else if (type == kFloat32) {
      Float32();
    } else {
      Blocks();
    }
  }

  bool HasFixedOrder() const { return parts > 0 && a.cols > 0; }
  bool UsesTiles() const { return type == kBFloat16 && tiles != nullptr; }

  /*! \brief Return whether Run packs rows of a. */
  bool PacksRows() const {
    const bool in_place = type == kFloat64 || a.cols == 0 || InPlace();
    return !in_place && (UsesTiles() || packed.rows > 0);
  }

  /*! \brief Return how many rows of a are packed at once. */
  int64_t RowsAtOnce() const {
    if (UsesTiles()) return MostPacked(a.rows, kPackedBytesA);
    const int64_t fitting = kPackedBytesA / (DeepBlocks() * kPackedStride * 4);
    return std::min(kPackedMostRows, std::max<int64_t>(packed.rows, fitting));
  }

  /*! \brief Return the floats of packed rows of a. */
  int64_t PackedFloats(int64_t rows) const {
    if (UsesTiles()) return (rows + kTileEdge - 1) / kTileEdge * kTileEdge * DeepTiles() / 2;
    return rows * DeepBlocks() * kPackedStride;
  }

  int64_t DeepBlocks() const { return (a.cols + kPackedDepth - 1) / kPackedDepth; }
  int64_t DeepTiles() const { return (a.cols + kTileStep - 1) / kTileStep * kTileStep; }
  /*! \brief Return how many rows or columns of tiles take at most some bytes, one tile at least. */
  int64_t MostPacked(int64_t count, int64_t bytes) const {
    const int64_t most = std::max(kTileEdge, bytes / (2 * DeepTiles()) / kTileEdge * kTileEdge);
    return std::min(most, (count + kTileEdge - 1) / kTileEdge * kTileEdge);
  }

  /*! \brief Compute a piece with k = 0, where all sums are 0. */
  void Nothing() const {
    float* zeros = scratch_c.Floats(b.cols);
    std::fill(zeros, zeros + b.cols, 0.0f);
    Finish(zeros, 0, 0, a.rows, 0, b.cols);
  }

  /*! \brief Return whether to read weights in place, without packing or widening them first. */
  bool InPlace() const {
    if (packed.rows > 0 && pair_dot == nullptr) return PackingIsSlower();
    const bool many = a.cols * b.cols >= kManyWeights;
    if (type == kFloat32 && !many) return false;
    if (a.rows <= (type == kFloat32 ? kFewRowsFloat32 : kFewRows)) return true;
    const int64_t most = pair_dot != nullptr ? tiles->rows_in_place : kDotRows;
    return many && !b.plain() && a.col == 1 && a.rows <= most;
  }

  /*!
   * \brief Return whether the kernels for few rows are faster than packed ones.
   *
   * Sums of weights that are contiguous along k have another order there. So that no split of a
   * matmul changes it, this does not depend on the number of columns, and the limit is lower than
   * the rows of pieces.
   */
  bool PackingIsSlower() const {
    if (!b.plain()) {
      return a.col == 1 && a.rows <= std::min(packed.dot_rows, a.cols / kStepsPerDotRow);
    }
    // Along n the order is the same.
    return a.rows <= (type == kFloat32 ? kFewRowsFloat32 : kFewRows) &&
           a.cols * b.cols >= kManyWeights;
  }

  void FewRows() const {
    const int64_t m = a.rows, n = b.cols, k = a.cols, weight = SizeOf(type);
    const bool dot = !b.plain(), pairs = dot && pair_dot != nullptr && a.col == 1;
    const char* x = a.data;
    int64_t ldx = a.row;
    if (!pairs && (type != kFloat32 || a.col != 1)) {
      float* widened = scratch_a.Floats(m * k);
      WidenTo(a, widened, k);
      x = reinterpret_cast<const char*>(widened);
      ldx = k;
    }
    const bool direct = target_type == kFloat32, finish = !direct || num_steps > 0;
    // Limit the columns per pass. Without dot products, their weights stay in a cache until the
    // last rows have used them. The dot kernels do that themselves; there the sums stay in a cache
    // until the steps are applied.
    int64_t cols = n;
    if (!dot && m > kSkinnyRows) cols = (512 << 10) / (k * weight);
    if (dot && finish) cols = kStepBytes / 4 / m;
    cols = std::min(n, std::max<int64_t>(64, cols / 64 * 64));
    for (int64_t j = 0; j < n; j += cols) {
      const int64_t width = std::min(cols, n - j);
      float* sums = direct ? reinterpret_cast<float*>(At(0, j)) : scratch_c.Floats(m * cols);
      const int64_t ld = direct ? ld_target : cols;
      const Weights weights{b.data + j * b.col * weight, b.ld()};
      if (dot) {
        const DotFn run = pairs ? pair_dot : kernels.dot[type];
        run(x, ldx, m, weights, k, width, sums, ld);
      } else {
        const float* floats = reinterpret_cast<const float*>(x);
        for (int64_t i = 0; i < m; i += kSkinnyRows) {
          const int64_t rows = std::min<int64_t>(kSkinnyRows, m - i);
          kernels.skinny[type][rows - 1](floats + i * ldx, ldx, weights, k, width, sums + i * ld,
                                         ld);
        }
      }
      if (finish) Finish(sums, ld, 0, m, j, width);
    }
  }

  /*!
   * \brief Pack `count` rows of a, from `first` on, of the rows [i, i + rows) that are packed at
   *        once: a block of all rows for each kPackedDepth steps.
   */
  void PackRowsOf(int64_t i, int64_t rows, int64_t first, int64_t count, float* to) const {
    if (UsesTiles()) {
      char* const of_first = reinterpret_cast<char*>(to) + first * DeepTiles() * 2;
      return tiles->pack_a({a.data, a.row, a.col}, i + first, count, a.cols, of_first);
    }
    // A whole row at a time, because the processor prefetches what is read in the order of memory.
    const int64_t at_once = a.plain() ? 1 : count;
    for (int64_t r = first; r < first + count; r += at_once) {
      for (int64_t p = 0; p < a.cols; p += kPackedDepth) {
        const int64_t deep = std::min(kPackedDepth, a.cols - p);
        const Matrix part = a.Block(type, i + r, at_once, p, deep);
        float* const of_part = to + (p / kPackedDepth * rows + r) * kPackedStride;
        if (a.plain()) {
          packed.lines[type](part.data, a.row, at_once, deep, deep, of_part, kPackedStride);
        } else {
          packed.transposed[type](part.data, a.col, deep, at_once, deep, of_part, kPackedStride);
        }
      }
    }
  }

  /*! \brief Return the packed rows [i, i + rows) of a. */
  const float* PackedRowsFrom(int64_t i, int64_t rows) const {
    if (packed_a != nullptr) return packed_a;  // they were packed for all pieces
    float* const to = scratch_a.Floats(PackedFloats(rows));
    PackRowsOf(i, rows, 0, rows, to);
    return to;
  }

  /*! \brief Pack `deep` steps of k, from step p, of a panel of columns. */
  void PackPanel(int64_t p, int64_t deep, int64_t j, float* to) const {
    const int64_t cols = std::min(packed.cols, b.cols - j);
    const Matrix block = b.Block(type, p, deep, j, cols);
    if (b.plain()) {
      packed.lines[type](block.data, b.row, deep, cols, packed.cols, to, packed.cols);
    } else {
      packed.transposed[type](block.data, b.col, cols, deep, packed.cols, to, packed.cols);
    }
  }

  /*! \brief Return what to prefetch of the panel that is packed after the one at (p, j). */
  PackedAhead After(int64_t p, int64_t j) const {
    p += kPackedDepth;
    if (p >= b.rows) {
      p = 0;
      j += packed.cols;
    }
    if (j >= b.cols) return {nullptr, 0, 0, 0};
    const int64_t line = b.ld() * SizeOf(type);
    const char* from = b.Block(type, p, 0, j, 0).data;
    if (b.plain()) return {from, 16 * line, line, 64};
    return {from, 16 * SizeOf(type), line, packed.cols > 16 ? 16 * line : 0};
  }

  /*! \brief Compute the sums of a panel, at column j, of the packed rows [i, i + rows). `sums` has
   *         room for a panel, and may be `to`. */
  void PackedPanel(const float* of_a, int64_t rows, int64_t j, float* of_b, float* sums, float* to,
                   int64_t ld) const {
    const int64_t k = a.cols, cols = std::min(packed.cols, b.cols - j);
    // Packing b costs more than it saves for a single tile of rows, and in a nearby cache.
    const bool in_place = type == kFloat32 && b.plain() && cols == packed.cols &&
                          (a.rows <= packed.rows || k * b.cols * 4 <= kPackedInPlaceBytes);
    for (int64_t p = 0; p < k; p += kPackedDepth) {
      const int64_t deep = std::min(kPackedDepth, k - p);
      const float* panel = of_b;
      int64_t line = packed.cols;
      if (in_place) {
        panel = reinterpret_cast<const float*>(b.Block(kFloat32, p, deep, j, cols).data);
        line = b.row;
      } else {
        PackPanel(p, deep, j, of_b);
      }
      const bool last = p + deep == k;
      // The rows of tiles differ by one at most: tiles of few rows are slow.
      const int64_t tiles = (rows + packed.rows - 1) / packed.rows;
      PackedAhead ahead = After(p, j);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t r = rows * tile / tiles, height = rows * (tile + 1) / tiles - r;
        float* before = sums + r * packed.cols;
        packed.tile[height](of_a + (p / kPackedDepth * rows + r) * kPackedStride, panel, line, deep,
                            ahead, p == 0 ? nullptr : before, last ? to + r * ld : before,
                            last ? ld : packed.cols);
        ahead.from = nullptr;
      }
    }
  }

  void Packed() const {
    const int64_t m = a.rows, n = b.cols, most = RowsAtOnce();
    const int64_t blocks = (m + most - 1) / most, height = (m + blocks - 1) / blocks;
    const bool direct = target_type == kFloat32;
    float* of_b = scratch_b.Floats(kPackedDepth * packed.cols);
    float* sums = scratch_c.Floats(height * (packed.cols + (direct ? 0 : kPackedFinishCols)));
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t i = m * block / blocks, rows = m * (block + 1) / blocks - i;
      const float* of_a = PackedRowsFrom(i, rows);
      for (int64_t first = 0; first < n; first += kPackedFinishCols) {
        const int64_t end = std::min(n, first + kPackedFinishCols);
        float* to = direct ? reinterpret_cast<float*>(At(i, first)) : sums + height * packed.cols;
        const int64_t ld = direct ? ld_target : kPackedFinishCols;
        int64_t j = first;
        for (; j + (direct ? packed.cols : 1) <= end; j += packed.cols) {
          PackedPanel(of_a, rows, j, of_b, sums, to + (j - first), ld);
        }
        const int64_t done = std::min(j, end);
        if (!direct || (num_steps > 0 && done > first))
          Finish(to, ld, i, rows, first, done - first);
        if (done < end) {
          // The target has no room for a whole panel.
          PackedPanel(of_a, rows, done, of_b, sums, sums, packed.cols);
          Finish(sums, packed.cols, i, rows, done, end - done);
        }
      }
    }
  }

  void Float32() const {
    const int64_t n = b.cols;
    const bool direct = target_type == kFloat32;
    int64_t block = a.rows;
    if (num_steps > 0 || !direct) {
      block = std::min(block, std::max(kStepRows, kStepBytes / (4 * n)));
    }
    for (int64_t i = 0; i < a.rows; i += block) {
      const int64_t rows = std::min(block, a.rows - i);
      float* sums = direct ? reinterpret_cast<float*>(At(i, 0)) : scratch_c.Floats(rows * n);
      const int64_t ld = direct ? ld_target : n;
      CallGemm(blas.sgemm, a.Block(kFloat32, i, rows, 0, a.cols), b, 0.0f, sums, ld);
      if (num_steps > 0 || !direct) Finish(sums, ld, i, rows, 0, n);
    }
  }

  void Blocks() const {
    const int64_t m = a.rows, n = b.cols, k = a.cols;
    const int64_t depth = std::min(k, kBlockDepth);
    float* sums = scratch_c.Floats(std::min(m, kBlockRows) * std::min(n, kBlockCols));
    float* wide_a = scratch_a.Floats(std::min(m, kBlockRows) * depth);
    float* wide_b = scratch_b.Floats(std::min(n, kBlockCols) * depth);
    for (int64_t i = 0; i < m; i += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, m - i);
      for (int64_t j = 0; j < n; j += kBlockCols) {
        const int64_t cols = std::min(kBlockCols, n - j);
        for (int64_t p = 0; p < k; p += depth) {
          const int64_t deep = std::min(depth, k - p);
          Matrix part_a = a.Block(type, i, rows, p, deep);
          Matrix part_b = b.Block(type, p, deep, j, cols);
          // If k fits in one block, a is still widened from the first block of columns.
          const bool widened = j > 0 && k <= depth;
          part_a = widened ? Like(part_a, wide_a) : WidenLike(part_a, wide_a);
          part_b = WidenLike(part_b, wide_b);
          CallGemm(blas.sgemm, part_a, part_b, p == 0 ? 0.0f : 1.0f, sums, cols);
        }
        Finish(sums, cols, i, rows, j, cols);
      }
    }
  }

  void InTiles() const {
    const int64_t m = a.rows, n = b.cols, k = a.cols;
    const int64_t deep = DeepTiles(), steps = deep / kTileStep, block_rows = RowsAtOnce();
    const int64_t block_cols = std::min(MostPacked(n, kPackedBytesB), kPanelCols);
    char* packed_b = reinterpret_cast<char*>(scratch_b.Floats(block_cols * deep / 2));
    float* sums = scratch_c.Floats(kTileEdge * (block_cols + kTileEdge));
    float* more = sums + kTileEdge * block_cols;
    const TileMatrix from_b{b.data, b.row, b.col};
    tiles->begin();
    for (int64_t i = 0; i < m; i += block_rows) {
      const int64_t rows = std::min(block_rows, m - i);
      const char* rows_of_a = reinterpret_cast<const char*>(PackedRowsFrom(i, rows));
      for (int64_t j = 0; j < n; j += block_cols) {
        const int64_t cols = std::min(block_cols, n - j);
        tiles->pack_b(from_b, j, cols, k, packed_b);
        for (int64_t r = 0; r < rows; r += kTileEdge) {
          const int64_t height = std::min(kTileEdge, rows - r);
          for (int64_t c = 0; c < cols; c += kTileEdge) {
            const bool two_rows = height > kTileEdge / 2;
            const char* of_a = rows_of_a + r * deep * 2;
            const char* of_b = packed_b + c * deep * 2;
            tiles->block(of_a, of_b, std::min(steps, kStretchSteps), two_rows, sums + c,
                         block_cols);
            for (int64_t p = kStretchSteps; p < steps; p += kStretchSteps) {
              const int64_t done = p * kTileStep * kTileEdge * 2;
              tiles->block(of_a + done, of_b + done, std::min(steps - p, kStretchSteps), two_rows,
                           more, kTileEdge);
              for (int64_t i = 0; i < (two_rows ? kTileEdge : kTileEdge / 2); ++i) {
                for (int64_t j = 0; j < kTileEdge; ++j) {
                  sums[i * block_cols + c + j] += more[i * kTileEdge + j];
                }
              }
            }
          }
          Finish(sums, block_cols, i + r, height, j, cols);
        }
      }
    }
    tiles->end();
  }

  /*! \brief Return the matrix that results from widening `from` into `to` in memory order. */
  static Matrix Like(const Matrix& from, float* to) {
    Matrix result = from;
    result.data = reinterpret_cast<char*>(to);
    if (from.plain()) {
      result.row = from.cols;
    } else {
      result.col = from.rows;
    }
    result.Settle();
    return result;
  }

  Matrix WidenLike(const Matrix& from, float* to) const {
    const int64_t lines = from.plain() ? from.rows : from.cols;
    const int64_t length = from.plain() ? from.cols : from.rows;
    for (int64_t line = 0; line < lines; ++line) {
      kernels.widen[type](to + line * length, from.data + line * from.ld() * SizeOf(type), length);
    }
    return Like(from, to);
  }

  void Float64() const {
    const int64_t m = a.rows, n = b.cols;
    double* sums = reinterpret_cast<double*>(target);
    if (a.cols == 0) {
      for (int64_t i = 0; i < m; ++i) std::fill_n(sums + i * ld_target, n, 0.0);
    } else if (m == 1) {
      // y = transposed(b) x
      const Matrix w = b.Transposed();
      const int64_t step = a.col;
      blas.dgemv(BlasLibrary::kRowMajor, w.plain() ? BlasLibrary::kPlain : BlasLibrary::kTransposed,
                 w.plain() ? w.rows : w.cols, w.plain() ? w.cols : w.rows, 1.0,
                 reinterpret_cast<const double*>(w.data), w.ld(),
                 reinterpret_cast<const double*>(a.data), step, 0.0, sums, 1);
    } else {
      CallGemm(blas.dgemm, a, b, 0.0, sums, ld_target);
    }
    for (int s = 0; s < num_steps; ++s) Take(steps[s], sums, m, n);
  }

  void Take(const Step& step, double* sums, int64_t m, int64_t n) const {
    const double* operand = reinterpret_cast<const double*>(step.operand);
    for (int64_t i = 0; i < m; ++i) {
      double* row = sums + i * ld_target;
      for (int64_t j = 0; j < n; ++j) {
        const double x = row[j];
        const int64_t at = i * step.row_stride + j * step.col_stride;
        switch (step.kind) {
          case kStepAdd:
            row[j] = x + operand[at];
            break;
          case kStepMultiply:
            row[j] = x * operand[at];
            break;
          case kStepRelu:
            row[j] = x > 0 ? x : 0;
            break;
          case kStepGelu:
            row[j] = 0.5 * x * std::erfc(-x * 0.70710678118654752440);
            break;
          case kStepGeluTanh: {
            const double u = 0.79788456080286535588 * (x + 0.044715 * x * x * x);
            row[j] = x / (1 + std::exp(-2 * u));
            break;
          }
          default:
            row[j] = x / (1 + std::exp(-x));
            break;
        }
      }
    }
  }
};

}  // namespace

void Piece::Finish(const float* sums, int64_t ld, int64_t i, int64_t rows, int64_t j,
                   int64_t cols) const {
  Step moved[kMaxSteps];
  for (int s = 0; s < num_steps; ++s) {
    moved[s] = steps[s];
    if (moved[s].operand != nullptr) {
      moved[s].operand +=
          (i * moved[s].row_stride + j * moved[s].col_stride) * SizeOf(moved[s].type);
    }
  }
  CurrentBlasKernels().finish(sums, ld, rows, cols, moved, num_steps, At(i, j), target_type,
                              ld_target);
}

void Piece::WidenTo(const Matrix& from, float* to, int64_t ld) const {
  const auto widen = CurrentBlasKernels().widen[type];
  if (from.col == 1) {
    for (int64_t i = 0; i < from.rows; ++i) {
      widen(to + i * ld, from.data + i * from.row * SizeOf(type), from.cols);
    }
    return;
  }
  for (int64_t j = 0; j < from.cols; ++j) {
    for (int64_t i = 0; i < from.rows; ++i) {
      widen(to + i * ld + j, from.data + (i * from.row + j * from.col) * SizeOf(type), 1);
    }
  }
}

void RunPiece(const Piece& piece) { PieceRunner(piece).Run(); }

PackedRows RowsToPack(const Piece& piece) {
  const PieceRunner runner(piece);
  if (runner.HasFixedOrder()) return RowsToPackInFixedOrder(piece);
  if (!runner.PacksRows()) return {0, 0};
  return {runner.RowsAtOnce(), runner.PackedFloats(piece.a.rows)};
}

void PackRows(const Piece& piece, int64_t first, int64_t count, float* to) {
  const PieceRunner runner(piece);
  if (runner.HasFixedOrder()) return PackRowsInFixedOrder(piece, first, count, to);
  runner.PackRowsOf(0, piece.a.rows, first, count, to);
}

}  // namespace tvm_ipc
