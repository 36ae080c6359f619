/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_across.h
 * \brief Reductions of teams across nodes, for whatever is done with what comes out.
 */
#ifndef TVM_IPC_MPI_REDUCE_ACROSS_H_
#define TVM_IPC_MPI_REDUCE_ACROSS_H_

#include "core/backend.h"
#include "mpi/across.h"
#include "mpi/reduce_plan.h"
#include "shm/allreduce.h"

namespace tvm_ipc {

/*!
 * \brief Reduce what all members of the team send, and give what a node wants to the sinks of its
 *        members, piece by piece, as what was reduced already.
 * \param mine What this rank shows.
 */
void ReduceAcross(RankWire& wire, Across& across, const Buffer& send, const Descriptor& mine,
                  Wanted wanted, Sink& sink);

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_REDUCE_ACROSS_H_
