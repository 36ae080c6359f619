/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file select.h
 * \brief Which of the kernels beside the BLAS run here.
 */
#ifndef TVM_IPC_BLAS_SELECT_H_
#define TVM_IPC_BLAS_SELECT_H_

#include <string>

#include "blas/kernels.h"

namespace tvm_ipc {

/*! \brief The kernels in use: the best ones, until a test wants others. */
const BlasKernels& CurrentBlasKernels();

/*! \brief Products of bfloat16, or nullptr where the processor has none or others were named. */
const TileKernels* CurrentTiles();

/*! \brief Products of bfloat16 with weights along k, or nullptr as CurrentTiles. */
DotFn CurrentPairDot();

/*! \brief Name of the instruction set of the kernels in use. */
std::string BlasInstructionSet();

/*! \brief Use the kernels of `avx512`, `avx2`, `portable` alone, those of `avx512bf16`, or the best
 *         and tile registers (`auto`); whether they run here. */
bool UseBlasInstructionSet(const char* name);

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_SELECT_H_
