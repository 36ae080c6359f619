/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file layout.h
 * \brief Where the members of a team are, when these are on several nodes.
 */
#ifndef TVM_IPC_CORE_LAYOUT_H_
#define TVM_IPC_CORE_LAYOUT_H_

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/group.h"

namespace tvm_ipc {

/*! \brief A team, node by node, in the order of the nodes' numbers. All members see the same. */
struct Layout {
  struct Node {
    int number;
    /*! \brief The members there, by their places in the team, in order. */
    std::vector<int> places;
    int size() const { return static_cast<int>(places.size()); }
  };

  Layout(const Rank& rank, TeamId team);

  TeamId team;
  /*! \brief By place. */
  std::vector<int> ranks;
  std::vector<Node> nodes;
  /*! \brief By place: the index of the member's node, and which it is of the members there. */
  std::vector<int> node_of;
  std::vector<int> index_of;
  /*! \brief This rank's place. */
  int me = 0;
  /*! \brief The index of this node. */
  int here = 0;
  /*! \brief As many members have a part of the work between the nodes on each of them. */
  int lanes = 0;

  int size() const { return static_cast<int>(ranks.size()); }
  bool across() const { return nodes.size() > 1; }
  /*! \brief The rank that is so many of those on a node; counted round. */
  int RankOn(int node, int index) const {
    const std::vector<int>& places = nodes[node].places;
    return ranks[places[index % places.size()]];
  }
};

/*! \brief Those of the teams of a rank, which never change. */
class Layouts {
 public:
  explicit Layouts(const Rank& rank) : rank_(rank) {}
  const Layout& Of(TeamId team);

 private:
  const Rank& rank_;
  std::mutex mutex_;
  std::map<TeamId, std::unique_ptr<Layout>> known_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_LAYOUT_H_
