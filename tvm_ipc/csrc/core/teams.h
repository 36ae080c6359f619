/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file teams.h
 * \brief The teams of a session: ordered sets of ranks, with ids that all of them know.
 *
 * A team is a value: whoever asks for the same ranks in the same order gets the same id, be it the
 * controller or a rank, member or not, before or after an error. So nobody has to agree with
 * anybody on when a team is made, and to ask again costs nothing. The records lie in the session's
 * control block, and live as long as it does.
 */
#ifndef TVM_IPC_CORE_TEAMS_H_
#define TVM_IPC_CORE_TEAMS_H_

#include <cstdint>
#include <vector>

#include "core/control.h"

namespace tvm_ipc {

/*!
 * \brief The id of the team of these ranks, in this order; made if there is none.
 * \param copy Another number is another team of the same ranks, for another thread of each.
 */
TeamId TeamOf(Control& control, const std::vector<int>& ranks, uint32_t copy);

/*!
 * \brief The id of the team that a rank is in, when ranks are divided into teams of equal size.
 * \param division That size, then the ranks of the teams, team after team.
 */
TeamId TeamIn(Control& control, const std::vector<int64_t>& division, int rank);

/*! \brief The record of a team that was made; null if there is none with that id. */
const TeamRecord* FindTeam(const Control& control, TeamId team);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_TEAMS_H_
