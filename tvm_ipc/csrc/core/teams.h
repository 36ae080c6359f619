/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file teams.h
 * \brief The teams of a session: ordered sets of ranks, with ids that all of them know.
 *
 * A team is a value: whoever asks for the same ranks in the same order gets the same id, be it the
 * controller or a rank, member or not, before or after an error. So nobody has to agree with
 * anybody on when a team is made, and to ask again costs nothing. The records lie in the session's
 * block, and live as long as it does.
 *
 * On several nodes the controller's hub makes them (nodes.h), and those of the nodes have the same.
 * There a rank asks for what its node has not yet, be it a team of these ranks or one whose number
 * came sooner than its record, and waits for the answer.
 */
#ifndef TVM_IPC_CORE_TEAMS_H_
#define TVM_IPC_CORE_TEAMS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/control.h"

namespace tvm_ipc {

class Rank;

/*!
 * \brief The id of the team of these ranks, in this order; made if there is none. On several nodes
 *        for hubs alone.
 * \param copy Another number is another team of the same ranks, for another thread of each.
 */
TeamId TeamOf(Control& control, const std::vector<int>& ranks, uint32_t copy);

/*! \brief The same for a rank. */
TeamId TeamOf(const Rank& rank, const std::vector<int>& ranks, uint32_t copy);

/*!
 * \brief The id of the team that a rank is in, when ranks are divided into teams of equal size.
 * \param division That size, then the ranks of the teams, team after team.
 */
TeamId TeamIn(const Rank& rank, const std::vector<int64_t>& division);

/*! \brief The record of a team that was made; null if there is none with that id. */
const TeamRecord* FindTeam(const Rank& rank, TeamId team);
/*! \brief The same of those that are known here. */
const TeamRecord* FindTeam(const Control& control, TeamId team);

/*! \brief Ranks from a byte each. */
std::vector<int> UnpackRanks(const std::string& bytes);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_TEAMS_H_
