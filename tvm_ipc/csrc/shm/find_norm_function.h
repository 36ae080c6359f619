/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file find_norm_function.h
 * \brief RMSNorm and LayerNorm of a row, with the instruction set of the reductions.
 */
#ifndef TVM_IPC_SHM_FIND_NORM_FUNCTION_H_
#define TVM_IPC_SHM_FIND_NORM_FUNCTION_H_

#include "core/element_type_and_reduce_kind.h"
#include "shm/reduce_table.h"

namespace tvm_ipc {

/*! \brief Return the function that normalises rows of one type into another; throw unless both are
 *         16-bit or 32-bit floats. */
NormFn RequireNorm(const char* operation, ElementType from, ElementType to);
/*! \brief Return the function that converts a type to float32; throw likewise. */
WidenFn RequireWiden(const char* operation, ElementType from);
/*! \brief Return the function that rounds float32 to a type; throw likewise. */
NarrowFn RequireNarrow(const char* operation, ElementType to);

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_FIND_NORM_FUNCTION_H_
