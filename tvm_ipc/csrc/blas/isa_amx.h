/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file isa_amx.h
 * \brief Configures and releases tile registers of 16 rows of 64 bytes; included by sources that
 * are compiled with AMX.
 */
#ifndef TVM_IPC_BLAS_ISA_AMX_H_
#define TVM_IPC_BLAS_ISA_AMX_H_

#include <immintrin.h>

#include <cstdint>

namespace tvm_ipc {
namespace {

struct __attribute__((packed)) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Not on the stack: g++ assumes that the instruction reads only 8 bytes of the configuration, and
// may omit the stores of the rest.
alignas(64) constexpr TileConfig kConfig;

inline void BeginTiles() { _tile_loadconfig(&kConfig); }

inline void EndTiles() { _tile_release(); }

}  // namespace
}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_ISA_AMX_H_
