/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file run_matmul_piece.h
 * \brief Single-threaded computation of one piece of a matmul: a block of one matrix.
 */
#ifndef TVM_IPC_BLAS_RUN_MATMUL_PIECE_H_
#define TVM_IPC_BLAS_RUN_MATMUL_PIECE_H_

#include <cstdint>

#include "blas/kernels_complementing_blas.h"
#include "blas/library.h"

namespace tvm_ipc {

inline int64_t SizeOf(FloatType type) { return type == kFloat64 ? 8 : type == kFloat32 ? 4 : 2; }

/*! \brief A matrix whose element (i, j) is at `i * row + j * col`; one of `row` and `col` is 1. */
struct Matrix {
  const char* data;
  int64_t rows, cols, row, col;
  Matrix Block(FloatType type, int64_t i, int64_t rows, int64_t j, int64_t cols) const {
    return {data + (i * row + j * col) * SizeOf(type), rows, cols, row, col};
  }
  Matrix Transposed() const { return {data, cols, rows, col, row}; }
  bool plain() const { return col == 1; }
  /*! \brief Return the stride of the rows, or of the columns if the matrix is transposed. */
  int64_t ld() const { return plain() ? row : col; }
  /*! \brief Set the strides of dimensions of size 1, which are arbitrary, as a BLAS expects. */
  void Settle() {
    if (cols == 1) col = row == 1 ? rows : 1;
    if (rows == 1) row = col == 1 ? cols : 1;
  }
};

/*! \brief target = steps(a b). The operands of the steps begin at the target's first element. */
struct Piece {
  const BlasLibrary& blas;
  FloatType type;  // of a and b
  FloatType target_type;
  Matrix a, b;
  char* target;
  int64_t ld_target;
  int num_steps;
  const Step* steps;
  int64_t parts;  // of k, see Product
  /*! \brief All rows of a, as PackRows stores them; nullptr if the piece packs them itself. */
  const float* packed_a = nullptr;

  char* At(int64_t i, int64_t j) const {
    return target + (i * ld_target + j) * SizeOf(target_type);
  }
  /*! \brief Apply the steps to a block of sums and store it. */
  void Finish(const float* sums, int64_t ld, int64_t i, int64_t rows, int64_t j,
              int64_t cols) const;
  /*! \brief Widen into rows that are `ld` elements apart, whatever the memory order of `from`. Only
   *         for few rows. */
  void WidenTo(const Matrix& from, float* to, int64_t ld) const;
};

constexpr int kMaxSteps = 8;

void RunPiece(const Piece& piece);

/*! \brief How a piece packs rows of a. */
struct PackedRows {
  int64_t most;    // rows that are packed at once; 0 if the piece reads a in place
  int64_t floats;  // size of all rows of the piece, when they are packed
};
PackedRows RowsToPack(const Piece& piece);
/*! \brief Pack the rows [first, first + count) of a piece to their place in `to`, which then is
 *         the `packed_a` of pieces with the same rows. `first` is a multiple of kTileEdge. */
void PackRows(const Piece& piece, int64_t first, int64_t count, float* to);

/*! \brief The same for a piece with parts > 0 and k > 0. */
void RunPieceInFixedOrder(const Piece& piece);
PackedRows RowsToPackInFixedOrder(const Piece& piece);
void PackRowsInFixedOrder(const Piece& piece, int64_t first, int64_t count, float* to);

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_RUN_MATMUL_PIECE_H_
