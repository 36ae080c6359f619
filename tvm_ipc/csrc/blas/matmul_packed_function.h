/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file matmul_packed_function.h
 * \brief Packed functions that multiply TVM tensors with a BLAS.
 */
#ifndef TVM_IPC_BLAS_MATMUL_PACKED_FUNCTION_H_
#define TVM_IPC_BLAS_MATMUL_PACKED_FUNCTION_H_

#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

namespace tvm_ipc {

/*!
 * \brief Compute a matmul and its epilogue steps.
 *
 * Arguments: (a_axes: int, b_axes: int, steps: int, parts: int, a, b, *operands, out).
 *
 * `a_axes` and `b_axes` are permutations as in `permute_dims`; `steps` is a list of `Epilogue`
 * (tvm_ipc/packed_functions/constants_shared_with_native_library.py). Each list has one hexadecimal
 * digit per entry, the first entry in the lowest digit; 0 means none. Each step that has an operand
 * takes the next one of `operands`. `parts` is that of Product: 0 for sums in the fastest order, or
 * a power of two that divides k. Throws LibraryError if there is no BLAS, ValueError if an argument
 * is wrong.
 */
void BlasMatmul(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);

/*!
 * \brief Return the configuration of the BLAS library, the kernels in use and the number of threads
 *        as JSON. Loads the library.
 */
tvm::ffi::String BlasInfo();

/*! \brief Use the kernels of one instruction set; "auto" selects the best. For tests. */
void UseBlasKernels(tvm::ffi::String name);

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_MATMUL_PACKED_FUNCTION_H_
