/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file blas.h
 * \brief Matrix products of TVM's tensors, as packed functions.
 */
#ifndef TVM_IPC_BLAS_BLAS_H_
#define TVM_IPC_BLAS_BLAS_H_

#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

namespace tvm_ipc {

/*!
 * \brief (a_axes: int, b_axes: int, steps: int, a, b, *operands, out): a product and its steps.
 *
 * The axes are a permutation as `permute_dims` takes it, the steps a list of contract.Epilogue:
 * one hexadecimal digit each, the first one lowest; 0 means none. Each step that has an operand
 * takes the next one. Throws LibraryError where there is no BLAS, ValueError of wrong arguments.
 */
void BlasMatmul(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);

/*! \brief JSON: the library that is loaded or was found, and the kernels beside it. Loads it. */
tvm::ffi::String BlasInfo();

/*! \brief Use the kernels of one instruction set; "auto" is the best. For tests. */
void UseBlasKernels(tvm::ffi::String name);

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_BLAS_H_
