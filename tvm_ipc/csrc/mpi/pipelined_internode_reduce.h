/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file pipelined_internode_reduce.h
 * \brief The reduction of teams of several nodes, with a sink for the reduced elements.
 */
#ifndef TVM_IPC_MPI_PIPELINED_INTERNODE_REDUCE_H_
#define TVM_IPC_MPI_PIPELINED_INTERNODE_REDUCE_H_

#include "core/communication_backend.h"
#include "mpi/internode_reduce_plan.h"
#include "mpi/internode_team_local_barrier.h"
#include "shm/allreduce.h"

namespace tvm_ipc {

/*!
 * \brief Reduce the sends of all members, and pass the wanted elements to the members' sinks, piece
 *        by piece (`Sink::Copy`).
 * \param mine This rank's descriptor.
 */
void ReduceInternode(InternodeRing& ring, InternodeTeam& internode_team, const Buffer& send,
                     const Descriptor& mine, ResultRecipients wanted, Sink& sink);

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_PIPELINED_INTERNODE_REDUCE_H_
