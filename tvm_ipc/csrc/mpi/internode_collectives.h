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
struct Context {
  Rank& rank;
  InternodeRing& ring;
  const NodeLayout& layout;

  /*! \brief Return the descriptor of a call. */
  Descriptor Describe(const Call& call) const {
    return DescriptorOf(call, layout.ranks[static_cast<size_t>(call.root)]);
  }
};

#define TVM_IPC_DECLARE(Name, text, relation, mpi, ...) \
  TVM_IPC_IF_##mpi(void Name(const Context& context, const Call& call);)
TVM_IPC_COLLECTIVES(TVM_IPC_DECLARE)
#undef TVM_IPC_DECLARE

/*! \brief Send to, and receive from, a rank of another node. */
void Send(Rank& rank, InternodeRing& ring, const Buffer& send, int receiver);
void Receive(Rank& rank, InternodeRing& ring, const Buffer& recv, int sender);

}  // namespace internode
}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_INTERNODE_COLLECTIVES_H_
