/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file select_kernels_by_instruction_set.h
 * \brief Reductions over several buffers, and copies: the arithmetic of the collectives, compiled
 *        once per instruction set and chosen when first used.
 */
#ifndef TVM_IPC_SHM_SELECT_KERNELS_BY_INSTRUCTION_SET_H_
#define TVM_IPC_SHM_SELECT_KERNELS_BY_INSTRUCTION_SET_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/element_type_and_reduce_kind.h"

namespace tvm_ipc {

/*!
 * \brief dst[i] = src[0][i] op src[1][i] op ... op src[num_src - 1][i], in that order.
 *
 * kTreeSum adds floats as a balanced binary tree, ((s0 + s1) + (s2 + s3)) + ...: more than one
 * source is split at the largest power of two below their number.
 *
 * 16-bit floats accumulate in float32 and round once, to nearest even, at the end; integers
 * accumulate in a wider integer and wrap at the end; an average divides the whole sum, integers
 * towards zero. NaN in any source gives NaN for every kind. The result has the same bits on
 * every instruction set. `dst` may be exactly one of the sources. No pointer needs alignment.
 * \param stream Bypass the caches; worth it for outputs larger than the caches.
 */
using ReduceFn = void (*)(void* dst, const void* const* src, int num_src, size_t count,
                          bool stream);

/*! \brief Return the reduction for a type; nullptr if there is none. */
ReduceFn FindReduce(ElementType type, ReduceKind kind);
/*! \brief Return the reduction for a type; throw if there is none. `operation` is for the error. */
ReduceFn RequireReduce(const char* operation, ElementType type, ReduceKind kind);

/*! \brief Copy like memcpy; with `stream` bypass the caches. */
void CopyBytes(void* dst, const void* src, size_t bytes, bool stream);

/*! \brief Return the instruction set in use: "avx512bf16", "avx512", "avx2" or "portable". */
const char* InstructionSet();

/*!
 * \brief Select an instruction set for this process; "auto" is the best one.
 * \return Whether the machine has it; if not, nothing changes.
 */
bool UseInstructionSet(const std::string& name);

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_SELECT_KERNELS_BY_INSTRUCTION_SET_H_
