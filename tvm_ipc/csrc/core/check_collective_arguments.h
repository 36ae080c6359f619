/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file check_collective_arguments.h
 * \brief The checks of the arguments of collectives, for all backends.
 */
#ifndef TVM_IPC_CORE_CHECK_COLLECTIVE_ARGUMENTS_H_
#define TVM_IPC_CORE_CHECK_COLLECTIVE_ARGUMENTS_H_

#include <vector>

#include "core/collective_call.h"

namespace tvm_ipc {

class Rank;

/*!
 * \brief Throw unless the arguments of a call fit together. Types are checked by the kernels, which
 *        know those that they support.
 *
 * Backends check a call before they begin the operation. Each rank with wrong arguments thus
 * reports them, also if another rank has already ended the waits of the session. A rank that is no
 * member of the team gets its error when the operation begins.
 */
void Check(const Rank& rank, const Call& call);

/*!
 * \brief Likewise, for a member of a team.
 * \param size The size of the team.
 * \param index This member's index in the team.
 */
void Check(const Call& call, int size, int index);

/*!
 * \brief Check the buffers of a reduction of slices, and bring them into team order.
 * \param parts Entry i belongs to the member i places before this one; entry 0 is its own.
 * \param sources Receives the parts' data, by team index; it has room for all members.
 * \return The number of members.
 */
int OrderSlices(const Rank& rank, TeamId team, const std::vector<Buffer>& parts, const Buffer& recv,
                const void** sources);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_CHECK_COLLECTIVE_ARGUMENTS_H_
