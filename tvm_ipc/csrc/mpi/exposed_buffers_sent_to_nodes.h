/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file exposed_buffers_sent_to_nodes.h
 * \brief Exposed buffers of teams on several nodes. Ranks of one node read each other's memory in
 *        place, as in shm/exposed_buffers.cc; buffers of other nodes are read from a received copy.
 *
 * A rank that exposes a tensor sends a copy to each other node of the team at once, as sequential
 * messages. On each of these nodes one member, the taker, provides memory for the copy when it
 * exposes its own tensor of that number, which has the same type and size. The taker writes the
 * location to the exposure table that the exposing rank has in the control block of the taker's
 * node, where only the taker writes it. All members of the node wait for that entry, as for a rank
 * of their own node, and then for the messages.
 *
 * A release waits until this member's sends and receives are done, then synchronizes the members on
 * this node. Only they read the memory here, so that is enough.
 */
#ifndef TVM_IPC_MPI_EXPOSED_BUFFERS_SENT_TO_NODES_H_
#define TVM_IPC_MPI_EXPOSED_BUFFERS_SENT_TO_NODES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/communication_backend.h"
#include "core/internode_arena_block.h"
#include "core/team_members_by_node.h"

namespace tvm_ipc {

class InternodeExposedBuffers {
 public:
  InternodeExposedBuffers(Rank& rank, InternodeRing& ring) : rank_(rank), ring_(ring) {}

  ExposedBuffer Expose(const NodeLayout& layout, const Buffer& tensor,
                       std::shared_ptr<const void> keep);
  PeerMemory PeerView(const NodeLayout& layout, ExposedBuffer& exposed, int64_t shift);
  void Release(const NodeLayout& layout, const std::vector<const ExposedBuffer*>& exposed);

 private:
  /*! \brief The copy that is received from a member of another node. */
  struct Landing {
    int rank;
    int index;
    std::unique_ptr<RingBlock> block;
    std::vector<RingTicket> tickets;
  };
  /*! \brief The messages in flight of a number. */
  struct NumberInFlight {
    std::unique_ptr<RingBlock> copy;
    std::vector<RingTicket> sent;
    std::vector<Landing> landings;
  };
  struct OfTeam {
    uint32_t generation = 0;
    std::map<uint32_t, NumberInFlight> in_flight;
  };

  OfTeam& Of(TeamId team, uint32_t generation);
  std::vector<Landing> Prepare(const NodeLayout& layout, uint32_t generation, const Buffer& tensor,
                               const Descriptor& mine);
  void Start(const NodeLayout& layout, NumberInFlight& number_in_flight, const Buffer& tensor,
             const Descriptor& mine);
  void Announce(const NodeLayout& layout, const Landing& landing, const Buffer& tensor,
                uint32_t number);
  uint8_t* Arrived(const NodeLayout& layout, const TeamBarrier& barrier,
                   const ExposedBuffer& exposed, int index);
  void Finish(const NodeLayout& layout, const TeamBarrier& barrier, uint32_t number,
              NumberInFlight& number_in_flight);

  Rank& rank_;
  InternodeRing& ring_;
  std::mutex mutex_;
  /*! \brief Only one thread at a time is in an operation of a team. */
  std::map<TeamId, OfTeam> teams_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_EXPOSED_BUFFERS_SENT_TO_NODES_H_
