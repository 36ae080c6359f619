/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file team_members_by_node.h
 * \brief The distribution of a team's members over nodes.
 */
#ifndef TVM_IPC_CORE_TEAM_MEMBERS_BY_NODE_H_
#define TVM_IPC_CORE_TEAM_MEMBERS_BY_NODE_H_

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/rank_runtime_state.h"

namespace tvm_ipc {

/*! \brief A team, node by node, in the order of the node numbers. Identical on all members. */
struct NodeLayout {
  struct Node {
    int number;
    /*! \brief The team indices of the members there, in order. */
    std::vector<int> members;
    int size() const { return static_cast<int>(members.size()); }
  };

  NodeLayout(const Rank& rank, TeamId team);

  TeamId team;
  /*! \brief The rank of each team index. */
  std::vector<int> ranks;
  std::vector<Node> nodes;
  /*! \brief For each team index: the index of the member's node, and its index among the members
   *         there. */
  std::vector<int> node_of;
  std::vector<int> index_of;
  /*! \brief This rank's team index. */
  int me = 0;
  /*! \brief The index of this node. */
  int here = 0;
  /*! \brief The number of members of each node that exchange data with other nodes. */
  int slices = 0;

  int size() const { return static_cast<int>(ranks.size()); }
  bool is_internode() const { return nodes.size() > 1; }
  /*! \brief Return the rank with an index among the members of a node; wraps. */
  int RankOn(int node, int index) const {
    const std::vector<int>& members = nodes[node].members;
    return ranks[members[index % members.size()]];
  }
};

/*! \brief The layouts of a rank's teams, which never change. */
class NodeLayouts {
 public:
  explicit NodeLayouts(const Rank& rank) : rank_(rank) {}
  const NodeLayout& Of(TeamId team);

 private:
  const Rank& rank_;
  std::mutex mutex_;
  std::map<TeamId, std::unique_ptr<NodeLayout>> layouts_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_TEAM_MEMBERS_BY_NODE_H_
