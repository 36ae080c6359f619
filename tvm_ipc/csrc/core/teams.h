/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file teams.h
 * \brief The teams of a session: ordered sets of ranks, with ids that all ranks share.
 *
 * A team is a value: the same ranks in the same order always have the same id. It does not matter
 * whether the controller or a rank asks, whether the rank is a member, or whether an error came in
 * between. So creating a team needs no agreement, and looking it up again is cheap. The records are
 * stored in the session's control block and live as long as it does.
 *
 * With several nodes the controller's session server creates all teams
 * (internode_session_event_relay.h) and the nodes have the same tables. A rank requests a team that
 * its node does not have yet, either by its ranks or because its id arrived before its record, and
 * waits for the answer.
 */
#ifndef TVM_IPC_CORE_TEAMS_H_
#define TVM_IPC_CORE_TEAMS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/shared_memory_layout.h"

namespace tvm_ipc {

class Rank;

/*!
 * \brief Return the id of the team of these ranks, in this order; create it if there is none. With
 *        several nodes only session servers may call this.
 * \param copy A different number is a different team of the same ranks, for another thread of each.
 */
TeamId TeamOf(Control& control, const std::vector<int>& ranks, uint32_t copy);

/*! \brief Like the function above, for a rank. */
TeamId TeamOf(const Rank& rank, const std::vector<int>& ranks, uint32_t copy);

/*!
 * \brief Return the id of the rank's team among teams of equal size; kNoTeam if it is in none.
 * \param division The size, then the ranks of each team in turn.
 */
TeamId TeamIn(const Rank& rank, const std::vector<int64_t>& division);

/*! \brief Return the record of a user-created team; null if there is none with that id. */
const TeamRecord* FindTeam(const Rank& rank, TeamId team);
/*! \brief Return the record if this node knows the team; otherwise null. */
const TeamRecord* FindTeam(const Control& control, TeamId team);

/*! \brief Unpack ranks from one byte each. */
std::vector<int> UnpackRanks(const std::string& bytes);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_TEAMS_H_
