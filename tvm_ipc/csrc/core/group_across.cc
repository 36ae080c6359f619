/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file group_across.cc
 * \brief What a rank begins with ranks of other nodes.
 */
#include <algorithm>
#include <numeric>

#include "core/group.h"

namespace tvm_ipc {

std::vector<int> Rank::RanksOf(TeamId team) const {
  if (team < kFirstTeam) {
    const int size = SizeOf(team);
    std::vector<int> ranks(size);
    std::iota(ranks.begin(), ranks.end(), id_ / size * size);
    return ranks;
  }
  const TeamRecord& record = Record(team);
  return std::vector<int>(record.ranks, record.ranks + record.size);
}

Turn Rank::BeginAcross(TeamId team) {
  RequireOwnThread();
  Meeting* meeting = nullptr;
  if (std::lock_guard<std::mutex> lock(across_mutex_); true) {
    std::unique_ptr<Meeting>& known = across_[team];
    if (known == nullptr) {
      if (team >= kFirstTeam) Made(team);  // whether this rank is in it
      const std::vector<int> all = RanksOf(team);
      std::vector<int> ranks, places;
      for (size_t i = 0; i < all.size(); ++i) {
        if (!control().IsHere(all[i])) continue;
        ranks.push_back(all[i]);
        places.push_back(team < kFirstTeam ? static_cast<int>(team) : Record(team).places[i]);
      }
      const bool works = team >= kFirstTeam && Record(team).copy >= kCopiesOfWorks;
      known = std::make_unique<Meeting>(
          control(), team, ranks, places,
          static_cast<int>(std::find(ranks.begin(), ranks.end(), id_) - ranks.begin()), options_,
          works ? kWaitOfWorks : options_.wait);
      known->Name(all);
    }
    meeting = known.get();
  }
  return Take(*meeting);
}

RemoteLink Rank::BeginRemote(int peer, bool sends) {
  RequireOwnThread();
  Channel& channel = sends ? control().channel(id_, peer) : control().channel(peer, id_);
  RemoteLink link{Busy(!shared_ ? nullptr
                       : sends  ? &channel.sender_busy
                                : &channel.receiver_busy),
                  0};
  RequireAlone(link.busy, sends ? "send to" : "receive from", peer);
  link.generation = CheckSession();
  return link;
}

}  // namespace tvm_ipc
