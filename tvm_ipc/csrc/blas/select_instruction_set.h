/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file select_instruction_set.h
 * \brief Selection of the kernels of kernels_complementing_blas.h at run time.
 */
#ifndef TVM_IPC_BLAS_SELECT_INSTRUCTION_SET_H_
#define TVM_IPC_BLAS_SELECT_INSTRUCTION_SET_H_

#include <string>

#include "blas/kernels_complementing_blas.h"

namespace tvm_ipc {

/*! \brief Return the kernels in use: the best ones, unless a test selected others. */
const BlasKernels& CurrentBlasKernels();

/*! \brief Return the bfloat16 kernels, or nullptr if the processor cannot run them or
 *         UseBlasInstructionSet excluded them. */
const TileKernels* CurrentTiles();

/*! \brief Return the bfloat16 kernel for weights that are contiguous along k, or nullptr as
 *         CurrentTiles does or if the processor lacks it. */
DotFn CurrentPairDot();

/*! \brief Return the attention of a type: that of bfloat16 is in tile registers if CurrentTiles is,
 *         or else multiplies pairs, where CurrentPairDot has a kernel. */
const AttentionKernels& CurrentAttention(FloatType type);

/*! \brief Return whether the kernels in use can add up sums in a fixed order (Product::parts). */
bool OrdersSums();

/*! \brief Return the names of the kernels in use. */
std::string BlasInstructionSet();

/*! \brief Use only the kernels of `avx512`, `avx2` or `portable`, add those of `avx512bf16`, or use
 *         the best ones including tile registers (`auto`). Return whether this machine has them. */
bool UseBlasInstructionSet(const char* name);

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_SELECT_INSTRUCTION_SET_H_
