/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_collectives.h
 * \brief The collectives of teams whose members are on several nodes, with the semantics of
 *        shm/collectives.h, which has those within a node.
 */
#ifndef TVM_IPC_MPI_INTERNODE_COLLECTIVES_H_
#define TVM_IPC_MPI_INTERNODE_COLLECTIVES_H_

#include <cstdint>

#include "core/communication_backend.h"
#include "core/team_members_by_node.h"

namespace tvm_ipc {

class InternodeRing;

namespace internode {

/*! \brief The rank, its internode ring, and the team. */
struct Call {
  Rank& rank;
  InternodeRing& ring;
  const NodeLayout& layout;
};

void AllReduce(const Call& call, const Buffer& send, ReduceKind kind, Strategy strategy,
               uint8_t flags, const Buffer& recv);
void AllReduceNorm(const Call& call, const Buffer& send, const Buffer& residual, const Norm& norm,
                   Strategy strategy, uint8_t flags, const Buffer& residual_out,
                   const Buffer& norm_out);
void ReduceScatter(const Call& call, const Buffer& send, ReduceKind kind, uint8_t flags,
                   const Buffer& recv);
void Reduce(const Call& call, const Buffer& send, ReduceKind kind, int root, uint8_t flags,
            const Buffer* recv);
void AllToAll(const Call& call, const Buffer& send, const SplitCounts& parts, uint8_t flags,
              const Buffer& recv);
void Permute(const Call& call, const Buffer& send, const Sources& sources, uint8_t flags,
             const Buffer& recv);
void AllGather(const Call& call, const Buffer& send, uint8_t flags, const Buffer& recv);
void Broadcast(const Call& call, const Buffer* send, int root, uint8_t flags, const Buffer& recv);
void Scatter(const Call& call, const Buffer* send, int root, uint8_t flags, const Buffer& recv);
void Gather(const Call& call, const Buffer& send, int root, uint8_t flags, const Buffer* recv);

/*! \brief Send to, and receive from, a rank of another node. */
void Send(Rank& rank, InternodeRing& ring, const Buffer& send, int receiver);
void Receive(Rank& rank, InternodeRing& ring, const Buffer& recv, int sender);

}  // namespace internode
}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_INTERNODE_COLLECTIVES_H_
