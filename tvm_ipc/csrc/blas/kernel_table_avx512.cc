/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernel_table_avx512.cc
 * \brief The kernels of kernels_complementing_blas.h for AVX-512 F, BW, VL and DQ; compiled with
 * these enabled. Empty on other architectures.
 */
#if defined(__x86_64__)
#include "blas/isa_avx512.h"
#define TVM_IPC_PACKED_KERNELS
#include "blas/kernel_table_of_instruction_set.h"

namespace tvm_ipc {
constexpr BlasKernels kAvx512Blas = MakeBlasKernels("avx512");
}  // namespace tvm_ipc
#endif  // __x86_64__
