/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file norm.h
 * \brief RMSNorm and LayerNorm of a row, with the instruction set of the reductions.
 */
#ifndef TVM_IPC_SHM_NORM_H_
#define TVM_IPC_SHM_NORM_H_

#include "core/element.h"
#include "shm/reduce_table.h"

namespace tvm_ipc {

/*! \brief Normalises rows of a type into another; throws if it is none of 16 or 32-bit floats. */
NormFn RequireNorm(const char* operation, ElementType from, ElementType to);
/*! \brief Makes float32 of a type; throws likewise. */
WidenFn RequireWiden(const char* operation, ElementType from);
/*! \brief Rounds float32 to a type; throws likewise. */
NarrowFn RequireNarrow(const char* operation, ElementType to);

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_NORM_H_
