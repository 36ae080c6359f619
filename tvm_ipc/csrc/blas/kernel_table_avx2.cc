/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernel_table_avx2.cc
 * \brief The kernels of kernels_complementing_blas.h for AVX2, FMA and F16C; compiled with these
 * enabled. Empty on other architectures.
 */
#if defined(__x86_64__)
#include "blas/isa_avx2.h"
#define TVM_IPC_PACKED_KERNELS
#include "blas/kernel_table_of_instruction_set.h"

namespace tvm_ipc {
constexpr BlasKernels kAvx2Blas = MakeBlasKernels("avx2");
}  // namespace tvm_ipc
#endif  // __x86_64__
