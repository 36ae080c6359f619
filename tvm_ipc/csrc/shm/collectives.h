/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file collectives.h
 * \brief The kernels of collectives between ranks of one machine. The arguments of their calls have
 *        been checked, except for types.
 */
#ifndef TVM_IPC_SHM_COLLECTIVES_H_
#define TVM_IPC_SHM_COLLECTIVES_H_

#include <cstddef>

#include "core/collective_call.h"
#include "shm/select_kernels_by_instruction_set.h"
#include "shm/team_operation.h"

namespace tvm_ipc {

#define TVM_IPC_DECLARE(Name, ...) void Name(Team& team, const Call& call);
TVM_IPC_COLLECTIVES(TVM_IPC_DECLARE)
#undef TVM_IPC_DECLARE

/*! \brief Up to this size a copy is cheaper than an exit barrier. */
constexpr size_t kEagerBytes = 2 << 10;

/*! \brief Outputs of at least this many bytes bypass the caches, where their reader would no longer
 *         find them anyway. */
constexpr size_t kStreamBytes = 32 << 20;

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_COLLECTIVES_H_
