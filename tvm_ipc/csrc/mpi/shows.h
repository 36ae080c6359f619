/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file shows.h
 * \brief What members of a team on several nodes show: ranks of a node read each other's memory
 *        where it lies, as in shm/shows.cc, and what is shown elsewhere where it arrives.
 *
 * Who shows a tensor sends a copy of it to each other node of the team, at once, in messages that
 * come one after the other; there one member, the taker, has given memory for it when it showed its
 * own tensor of that number, which is of equal type. The taker writes where that is to the board
 * that the showing rank has in the control block of the taker's node, which is nobody else's, and
 * all members of the node wait there as they do for a rank that is here, and then for the messages.
 *
 * To hide waits until what this member has sent has gone, and what it takes has come; then those on
 * this node meet. Nobody else reads what lies here, so that is enough.
 */
#ifndef TVM_IPC_MPI_SHOWS_H_
#define TVM_IPC_MPI_SHOWS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/backend.h"
#include "core/layout.h"
#include "core/wire_block.h"

namespace tvm_ipc {

class ShowsAcross {
 public:
  ShowsAcross(Rank& rank, RankWire& wire) : rank_(rank), wire_(wire) {}

  Shown Show(const Layout& layout, const Buffer& tensor, std::shared_ptr<const void> keep);
  PeerMemory Peer(const Layout& layout, Shown& shown, int64_t shift);
  void Hide(const Layout& layout, const std::vector<const Shown*>& shown);

 private:
  /*! \brief What comes from a member of another node. */
  struct Landing {
    int rank;
    int place;
    std::unique_ptr<WireBlock> block;
    std::vector<WireTicket> tickets;
  };
  /*! \brief What a number has on the wire. */
  struct Flight {
    std::unique_ptr<WireBlock> copy;
    std::vector<WireTicket> sent;
    std::vector<Landing> landings;
  };
  struct OfTeam {
    uint32_t generation = 0;
    std::map<uint32_t, Flight> flights;
  };

  OfTeam& Of(TeamId team, uint32_t generation);
  std::vector<Landing> Prepare(const Layout& layout, uint32_t generation, const Buffer& tensor,
                               const Descriptor& mine);
  void Start(const Layout& layout, Flight& flight, const Buffer& tensor, const Descriptor& mine);
  void Announce(const Layout& layout, const Landing& landing, const Buffer& tensor,
                uint32_t number);
  uint8_t* Arrived(const Layout& layout, const Meeting& meeting, const Shown& shown, int place);
  void Finish(const Layout& layout, const Meeting& meeting, uint32_t number, Flight& flight);

  Rank& rank_;
  RankWire& wire_;
  std::mutex mutex_;
  /*! \brief One thread at a time is in an operation of a team. */
  std::map<TeamId, OfTeam> teams_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_MPI_SHOWS_H_
