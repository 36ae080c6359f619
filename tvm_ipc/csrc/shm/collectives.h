/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file collectives.h
 * \brief The operations between ranks, on plain memory.
 *
 * Every function throws Error and leaves the inputs as they were. Outputs may be half written
 * after an error. Teams are named by their ids (core/teams.h). Inputs in the rank's arena are read
 * by peers in place; others are staged.
 */
#ifndef TVM_IPC_SHM_COLLECTIVES_H_
#define TVM_IPC_SHM_COLLECTIVES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "core/group.h"
#include "shm/reduce.h"

namespace tvm_ipc {

void AllReduce(Rank& rank, const Buffer& send, ReduceKind kind, TeamId team, Strategy strategy,
               uint8_t flags, const Buffer& recv);
/*!
 * \brief residual_out = residual + the sum of the members' sends; norm_out = its rows, normalised.
 *        residual_out may be residual; otherwise outputs overlap nothing.
 */
void AllReduceNorm(Rank& rank, const Buffer& send, const Buffer& residual, const Norm& norm,
                   TeamId team, Strategy strategy, uint8_t flags, const Buffer& residual_out,
                   const Buffer& norm_out);
/*! \brief recv = this member's part of what an all-reduce would give. */
void ReduceScatter(Rank& rank, const Buffer& send, ReduceKind kind, TeamId team, uint8_t flags,
                   const Buffer& recv);
/*! \brief On the member with this place, recv = what an all-reduce would give. */
void Reduce(Rank& rank, const Buffer& send, ReduceKind kind, int root, TeamId team, uint8_t flags,
            const Buffer* recv);
/*! \brief Part i of recv = this member's part of member i's send. */
void AllToAll(Rank& rank, const Buffer& send, const Parts& parts, TeamId team, uint8_t flags,
              const Buffer& recv);
/*! \brief recv = the send of the member that this one receives from, or zeros. */
void Permute(Rank& rank, const Buffer& send, const Sources& sources, TeamId team, uint8_t flags,
             const Buffer& recv);
/*! \brief recv = the members' sends, in rank order. */
void AllGather(Rank& rank, const Buffer& send, TeamId team, uint8_t flags, const Buffer& recv);
/*! \brief recv = the root's send. Others may pass nullptr. */
void Broadcast(Rank& rank, const Buffer* send, int root, TeamId team, uint8_t flags,
               const Buffer& recv);
/*! \brief recv = this member's part of the root's send. */
void Scatter(Rank& rank, const Buffer* send, int root, TeamId team, uint8_t flags,
             const Buffer& recv);
/*! \brief On the root, recv = the members' sends, in rank order. */
void Gather(Rank& rank, const Buffer& send, int root, TeamId team, uint8_t flags,
            const Buffer* recv);

/*! \brief Those of shows: core/backend.h says what they do. */
Shown Show(Rank& rank, const Buffer& tensor, TeamId team, std::shared_ptr<const void> keep);
PeerMemory Peer(Rank& rank, Shown& shown, int64_t shift);
void Hide(Rank& rank, TeamId team, const std::vector<const Shown*>& shown);
void ReduceParts(Rank& rank, ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                 const Buffer& recv);

/*! \brief Returns when the buffer may be written again. */
void Send(Rank& rank, const Buffer& send, int receiver);
void Receive(Rank& rank, const Buffer& recv, int sender);

/*! \brief Up to here a copy is cheaper than a second meeting, for the exit. */
constexpr size_t kEagerBytes = 2 << 10;

/*! \brief Outputs of at least this many bytes are written past the caches, for their reader would
 *         not find them there anyway. */
constexpr size_t kStreamBytes = 32 << 20;

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_COLLECTIVES_H_
