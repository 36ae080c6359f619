/* SPDX-License-Identifier: Apache-2.0 */
/*! \file team_members_by_node.cc */
#include "core/team_members_by_node.h"

#include <algorithm>

namespace tvm_ipc {

NodeLayout::NodeLayout(const Rank& rank, TeamId team) : team(team), ranks(rank.RanksOf(team)) {
  const Control& control = rank.control();
  std::map<int, std::vector<int>> members_by_node;
  for (int index = 0; index < size(); ++index) {
    members_by_node[control.NodeOf(ranks[index])].push_back(index);
    if (ranks[index] == rank.id()) me = index;
  }
  node_of.resize(ranks.size());
  index_of.resize(ranks.size());
  slices = size();
  for (auto& [number, members] : members_by_node) {
    for (size_t i = 0; i < members.size(); ++i) {
      node_of[members[i]] = static_cast<int>(nodes.size());
      index_of[members[i]] = static_cast<int>(i);
    }
    slices = std::min(slices, static_cast<int>(members.size()));
    nodes.push_back({number, std::move(members)});
  }
  here = node_of[me];
}

const NodeLayout& NodeLayouts::Of(TeamId team) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<NodeLayout>& layout = layouts_[team];
  if (layout == nullptr) layout = std::make_unique<NodeLayout>(rank_, team);
  return *layout;
}

}  // namespace tvm_ipc
