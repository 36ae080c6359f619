/* SPDX-License-Identifier: Apache-2.0 */
/*! \file teams.cc */
#include "core/teams.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "core/error.h"
#include "core/meeting.h"

namespace tvm_ipc {

namespace {

/*! \brief Far longer than anybody who runs holds the lock. */
constexpr std::chrono::seconds kLockTime{10};

/*! \brief Lets one thread at a time, of all processes of the session, make a team. */
class MakerLock {
 public:
  explicit MakerLock(Control& control) : word_(control.team_lock) {
    const auto end = std::chrono::steady_clock::now() + kLockTime;
    while (word_.exchange(1, std::memory_order_acquire) != 0) {
      if (std::chrono::steady_clock::now() > end) {
        Fail(kind::kRuntime,
             "no team can be made: a process of the session has been stopped, or"
             " has ended, while it made one");
      }
      sched_yield();
    }
  }
  ~MakerLock() { word_.store(0, std::memory_order_release); }
  MakerLock(const MakerLock&) = delete;
  MakerLock& operator=(const MakerLock&) = delete;

 private:
  std::atomic<uint32_t>& word_;
};

std::string ShowRanks(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return "[" + text + "]";
}

void CheckRanks(int num_ranks, const std::vector<int>& ranks) {
  if (ranks.empty()) Fail(kind::kValue, "a team has at least one rank");
  uint64_t seen = 0;
  for (int rank : ranks) {
    if (rank < 0 || rank >= num_ranks) {
      Fail(kind::kValue, "a team of ", ShowRanks(ranks), ": there is no rank ", rank, " among ",
           num_ranks, " workers");
    }
    if ((seen >> rank & 1) != 0) {
      Fail(kind::kValue, "a team of ", ShowRanks(ranks), ": rank ", rank, " is in it twice");
    }
    seen |= uint64_t{1} << rank;
  }
}

TeamId MadeTeam(uint32_t index) { return static_cast<TeamId>(kFirstTeam + index); }

/*! \brief The index of the record with these ranks among the first `count`, or `count`. */
uint32_t IndexOf(const Control& control, uint32_t count, const std::vector<int>& ranks,
                 uint32_t copy) {
  auto same = [&](const TeamRecord& record) {
    return record.copy == copy && record.size == ranks.size() &&
           std::equal(ranks.begin(), ranks.end(), record.ranks);
  };
  return static_cast<uint32_t>(std::find_if(control.teams, control.teams + count, same) -
                               control.teams);
}

}  // namespace

TeamId TeamOf(Control& control, const std::vector<int>& ranks, uint32_t copy) {
  static_assert(kMaxRanks <= 64, "a bit for each rank");
  CheckRanks(control.num_ranks, ranks);
  const uint32_t known = control.num_teams.load(std::memory_order_acquire);
  uint32_t index = IndexOf(control, known, ranks, copy);
  if (index < known) return MadeTeam(index);
  MakerLock lock(control);
  const uint32_t count = control.num_teams.load(std::memory_order_relaxed);
  index = IndexOf(control, count, ranks, copy);  // somebody else may have made it meanwhile
  if (index < count) return MadeTeam(index);
  if (count == kMaxTeams) {
    Fail(kind::kRuntime, "the session has ", kMaxTeams, " teams already, the most there can be");
  }
  for (int rank : ranks) {
    if (control.ranks[rank].seats.load(std::memory_order_relaxed) == kMaxSeats - kFirstTeam) {
      Fail(kind::kRuntime, "rank ", rank, " is in ", kMaxSeats - kFirstTeam,
           " teams already, the most there can be; teams live as long as the session");
    }
  }
  TeamRecord& record = control.teams[count];
  record.copy = copy;
  record.size = static_cast<uint32_t>(ranks.size());
  for (size_t i = 0; i < ranks.size(); ++i) {
    record.ranks[i] = static_cast<uint8_t>(ranks[i]);
    record.places[i] = static_cast<uint8_t>(
        kFirstTeam + control.ranks[ranks[i]].seats.fetch_add(1, std::memory_order_release));
  }
  // Whoever sees the new number sees the record.
  control.num_teams.store(count + 1, std::memory_order_release);
  return MadeTeam(count);
}

TeamId TeamIn(Control& control, const std::vector<int64_t>& division, int rank) {
  const int64_t size = division.empty() ? 0 : division[0];
  const int64_t ranks = static_cast<int64_t>(division.size()) - 1;
  if (size < 1 || ranks < 1 || ranks % size != 0) {
    Fail(kind::kValue,
         "ranks are divided into teams by the size of the teams, and then the ranks"
         " of team after team; not by ",
         ShowRanks({division.begin(), division.end()}));
  }
  const auto found = std::find(division.begin() + 1, division.end(), rank);
  if (found == division.end()) {
    Fail(kind::kValue, "rank ", rank, " is in none of the teams of ", size, " ranks each of ",
         ShowRanks({division.begin() + 1, division.end()}));
  }
  const auto first = division.begin() + 1 + (found - division.begin() - 1) / size * size;
  return TeamOf(control, {first, first + size}, 0);
}

const TeamRecord* FindTeam(const Control& control, TeamId team) {
  const uint32_t count = control.num_teams.load(std::memory_order_acquire);
  if (team < kFirstTeam || static_cast<uint32_t>(team - kFirstTeam) >= count) return nullptr;
  return &control.teams[team - kFirstTeam];
}

}  // namespace tvm_ipc
