/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file collectives.h
 * \brief The collectives and messages between ranks of one machine.
 *
 * Every function reports failures by throwing Error, and never modifies its inputs. Outputs may be
 * partly written after an error. Peers read inputs in the rank's arena in place; other inputs are
 * staged.
 */
#ifndef TVM_IPC_SHM_COLLECTIVES_H_
#define TVM_IPC_SHM_COLLECTIVES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/communication_backend.h"
#include "core/rank_runtime_state.h"
#include "shm/select_kernels_by_instruction_set.h"

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
/*! \brief recv = this member's slice of the reduction. */
void ReduceScatter(Rank& rank, const Buffer& send, ReduceKind kind, TeamId team, uint8_t flags,
                   const Buffer& recv);
/*! \brief On the root, recv = the reduction of the members' sends. */
void Reduce(Rank& rank, const Buffer& send, ReduceKind kind, int root, TeamId team, uint8_t flags,
            const Buffer* recv);
/*! \brief Slice i of recv = the slice of member i's send that is for this member. */
void AllToAll(Rank& rank, const Buffer& send, const SplitCounts& parts, TeamId team, uint8_t flags,
              const Buffer& recv);
/*! \brief recv = the send of the member that this one receives from, or zeros. */
void Permute(Rank& rank, const Buffer& send, const Sources& sources, TeamId team, uint8_t flags,
             const Buffer& recv);
/*! \brief recv = the members' sends, in rank order. */
void AllGather(Rank& rank, const Buffer& send, TeamId team, uint8_t flags, const Buffer& recv);
/*! \brief recv = the root's send. Others may pass nullptr. */
void Broadcast(Rank& rank, const Buffer* send, int root, TeamId team, uint8_t flags,
               const Buffer& recv);
/*! \brief recv = this member's slice of the root's send. */
void Scatter(Rank& rank, const Buffer* send, int root, TeamId team, uint8_t flags,
             const Buffer& recv);
/*! \brief On the root, recv = the members' sends, in rank order. */
void Gather(Rank& rank, const Buffer& send, int root, TeamId team, uint8_t flags,
            const Buffer* recv);

// Exposed buffers: documented in core/communication_backend.h.
ExposedBuffer Expose(Rank& rank, const Buffer& tensor, TeamId team,
                     std::shared_ptr<const void> keep);
PeerMemory PeerView(Rank& rank, ExposedBuffer& exposed, int64_t shift);
void Release(Rank& rank, TeamId team, const std::vector<const ExposedBuffer*>& exposed);
void ReduceSlices(Rank& rank, ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                  const Buffer& recv);

/*! \brief Return when the buffer may be written again. */
void Send(Rank& rank, const Buffer& send, int receiver);
void Receive(Rank& rank, const Buffer& recv, int sender);

/*! \brief Up to this size a copy is cheaper than an exit barrier. */
constexpr size_t kEagerBytes = 2 << 10;

/*! \brief Outputs of at least this many bytes bypass the caches, where their reader would no longer
 *         find them anyway. */
constexpr size_t kStreamBytes = 32 << 20;

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_COLLECTIVES_H_
