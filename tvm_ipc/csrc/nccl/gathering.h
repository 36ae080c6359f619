/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file gathering.h
 * \brief The members of a team in an operation, who meet on the host before they call NCCL.
 *
 * Those of one machine meet in shared memory (core/meeting.h). Where a team has members on several
 * nodes, those of each node do so; then the first of them tells the first of each other node what
 * they are about to do, by a short message (core/wire.h), and hears it from these; then those of
 * the node meet again. So nodes that disagree say so before NCCL is called, and a wait for a node
 * ends like any other. NCCL moves the tensors, over the network too; MPI moves these messages only.
 */
#ifndef TVM_IPC_NCCL_GATHERING_H_
#define TVM_IPC_NCCL_GATHERING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/group.h"
#include "core/layout.h"
#include "core/wire.h"
#include "nccl/library.h"

namespace tvm_ipc::nccl {

/*! \brief What members have found out about each other. */
struct Agreed {
  /*! \brief Whether all of them have the same, and none has nothing. */
  bool same = false;
  /*! \brief The sum of a number of each. */
  uint64_t sum = 0;
  /*! \brief Whether some of them are threads of one process. */
  bool threads = false;
};

class Gathering {
 public:
  /*! \param wire Null in a session of one machine. */
  Gathering(Rank& rank, RankWire* wire, const Layout& layout)
      : rank_(rank),
        wire_(wire),
        layout_(layout),
        turn_(layout.across() ? rank.BeginAcross(layout.team) : rank.Begin(layout.team)) {}

  int size() const { return layout_.size(); }
  /*! \brief This rank's place in the team. */
  int index() const { return layout_.me; }
  int rank(int place) const { return layout_.ranks[static_cast<size_t>(place)]; }
  /*! \brief Those on this node. */
  const Meeting& here() const { return turn_.meeting; }
  std::string Where() const { return turn_.meeting.Where(); }

  /*! \brief Meet. Throws when members are about to do different things. */
  void Enter(const Descriptor& mine);
  /*!
   * \brief Meet, and compare what each member has.
   * \param has Of the same thing the same; 0 is nothing.
   */
  Agreed Agree(Descriptor mine, uint32_t has, uint64_t number);
  /*! \brief Meet, and get what the first member tells; of the others `id` means nothing. */
  UniqueId Tell(const Descriptor& mine, const UniqueId& id);

 private:
  /*! \brief What the first member of a node says for all of them. */
  struct Said {
    uint64_t sum = 0;
    /*! \brief A number that no other process has. */
    uint64_t process = 0;
    uint32_t has = 0;
    uint32_t threads = 0;
    UniqueId id{};
  };

  bool leads() const { return turn_.meeting.index() == 0; }
  /*! \brief What the first members of all nodes say, by the index of a node. */
  std::vector<Said> Exchange(const Descriptor& mine, const Said& own);
  /*! \brief Meet those of this node, the first of whom waits for other nodes meanwhile. */
  void EnterAfterOthers(const Descriptor& mine) {
    turn_.meeting.Enter(mine, rank_.options().deadline * 5 / 4);
  }

  Rank& rank_;
  RankWire* wire_;
  const Layout& layout_;
  Turn turn_;
};

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_GATHERING_H_
