/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_avx512.cc
 * \brief The reductions for AVX-512 F, BW, VL and DQ; compiled with these enabled. Empty on other
 *        architectures.
 */
#if defined(__x86_64__)
#include "shm/reduce_avx512_intrinsics.h"
// Must follow the definition of Isa.
#include "shm/reduce_impl.h"

namespace tvm_ipc {
constexpr ReduceTable kAvx512Table = MakeTable("avx512");
}  // namespace tvm_ipc
#endif  // __x86_64__
