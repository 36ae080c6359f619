/* SPDX-License-Identifier: Apache-2.0 */
/*! \file layout.cc */
#include "core/layout.h"

#include <algorithm>

namespace tvm_ipc {

Layout::Layout(const Rank& rank, TeamId team) : team(team), ranks(rank.RanksOf(team)) {
  const Control& control = rank.control();
  std::map<int, std::vector<int>> places;
  for (int place = 0; place < size(); ++place) {
    places[control.NodeOf(ranks[place])].push_back(place);
    if (ranks[place] == rank.id()) me = place;
  }
  node_of.resize(ranks.size());
  index_of.resize(ranks.size());
  lanes = size();
  for (auto& [number, members] : places) {
    for (size_t i = 0; i < members.size(); ++i) {
      node_of[members[i]] = static_cast<int>(nodes.size());
      index_of[members[i]] = static_cast<int>(i);
    }
    lanes = std::min(lanes, static_cast<int>(members.size()));
    nodes.push_back({number, std::move(members)});
  }
  here = node_of[me];
}

const Layout& Layouts::Of(TeamId team) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Layout>& layout = known_[team];
  if (layout == nullptr) layout = std::make_unique<Layout>(rank_, team);
  return *layout;
}

}  // namespace tvm_ipc
