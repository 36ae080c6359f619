/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file collectives.h
 * \brief The operations of teams whose members are on several nodes, on plain memory: as those of
 *        shm/collectives.h, which has those inside of a node.
 */
#ifndef TVM_IPC_MPI_COLLECTIVES_H_
#define TVM_IPC_MPI_COLLECTIVES_H_

#include <cstdint>

#include "core/backend.h"
#include "core/layout.h"

namespace tvm_ipc {

class RankWire;

namespace across {

/*! \brief A rank's means of reaching other nodes, and the team. */
struct Call {
  Rank& rank;
  RankWire& wire;
  const Layout& layout;
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
void AllToAll(const Call& call, const Buffer& send, const Parts& parts, uint8_t flags,
              const Buffer& recv);
void Permute(const Call& call, const Buffer& send, const Sources& sources, uint8_t flags,
             const Buffer& recv);
void AllGather(const Call& call, const Buffer& send, uint8_t flags, const Buffer& recv);
void Broadcast(const Call& call, const Buffer* send, int root, uint8_t flags, const Buffer& recv);
void Scatter(const Call& call, const Buffer* send, int root, uint8_t flags, const Buffer& recv);
void Gather(const Call& call, const Buffer& send, int root, uint8_t flags, const Buffer* recv);

/*! \brief To and from a rank of another node. */
void Send(Rank& rank, RankWire& wire, const Buffer& send, int receiver);
void Receive(Rank& rank, RankWire& wire, const Buffer& recv, int sender);

}  // namespace across
}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_COLLECTIVES_H_
