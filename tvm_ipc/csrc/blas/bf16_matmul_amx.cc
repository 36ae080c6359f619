/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file bf16_matmul_amx.cc
 * \brief bfloat16 matmuls in AMX tile registers; compiled with AMX and AVX-512 enabled. Empty on
 *        other architectures.
 *
 * One instruction multiplies a tile of a by a tile of b and adds the product, 16 x 16 float32, to a
 * third tile. Four tiles of sums stay in registers for all steps of a call. The instruction treats
 * denormal numbers as zeros.
 */
#include "blas/kernels_complementing_blas.h"

#if defined(__x86_64__)
#include "blas/isa_amx.h"
#include "blas/kernels_bf16_packing.h"

namespace tvm_ipc {
namespace {

/*! \brief Compute the sums of one block of rows and one panel of columns. */
void Block(const char* a, const char* b, int64_t steps, bool two_rows, float* sums, int64_t ld) {
  _tile_zero(0);
  _tile_zero(1);
  if (two_rows) {
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t p = 0; p < steps; ++p, a += 2 * kTileBytes, b += 2 * kTileBytes) {
      _tile_loadd(4, a, 64);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + kTileBytes, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, sums + kHalf * ld, ld * 4);
    _tile_stored(3, sums + kHalf * ld + kHalf, ld * 4);
  } else {
    for (int64_t p = 0; p < steps; ++p, a += 2 * kTileBytes, b += 2 * kTileBytes) {
      _tile_loadd(4, a, 64);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, sums, ld * 4);
  _tile_stored(1, sums + kHalf, ld * 4);
}

}  // namespace

constexpr TileKernels kTileKernels = {"amx", 8, BeginTiles, PackA, PackB, Block, EndTiles};

}  // namespace tvm_ipc
#endif  // __x86_64__
