/* SPDX-License-Identifier: Apache-2.0 */
/*! \file teams.cc */
#include "core/teams.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "core/collective_step_barrier.h"
#include "core/error.h"
#include "core/rank_runtime_state.h"
#include "core/wait.h"

namespace tvm_ipc {

namespace {

/*! \brief Far longer than a running process holds the lock. */
constexpr std::chrono::seconds kLockTime{10};

/*! \brief Lets one thread at a time create a team, across all processes of the session. */
class MakerLock {
 public:
  explicit MakerLock(Control& control) : word_(control.team_lock) {
    const auto end = std::chrono::steady_clock::now() + kLockTime;
    while (word_.exchange(1, std::memory_order_acquire) != 0) {
      if (std::chrono::steady_clock::now() > end) {
        Fail(kind::kRuntime,
             "no team can be created: a process of the session was stopped or"
             " ended while it created one");
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

template <typename Number>
std::string ListOf(const Number* begin, const Number* end) {
  std::string text;
  for (; begin != end; ++begin) text += (text.empty() ? "" : ", ") + std::to_string(*begin);
  return "[" + text + "]";
}

/*! \brief Throw unless the ranks exist and differ. `what` begins the error, before the ranks. */
template <typename Number>
void CheckRanks(int num_ranks, const Number* begin, const Number* end, const char* what) {
  if (begin == end) Fail(kind::kValue, "a team has at least one rank");
  uint64_t listed = 0;
  for (const Number* rank = begin; rank != end; ++rank) {
    if (*rank < 0 || *rank >= num_ranks) {
      Fail(kind::kValue, what, ListOf(begin, end), ": there is no rank ", *rank, " among ",
           num_ranks, " workers");
    }
    if ((listed >> *rank & 1) != 0) {
      Fail(kind::kValue, what, ListOf(begin, end), ": rank ", *rank, " is there twice");
    }
    listed |= uint64_t{1} << *rank;
  }
}

TeamId UserTeamId(uint32_t index) { return static_cast<TeamId>(kFirstTeam + index); }

/*! \brief Return the index of the team among the first `count` records; `count` if it is not there.
 */
uint32_t IndexOf(const Control& control, uint32_t count, const std::vector<int>& ranks,
                 uint32_t copy) {
  auto same = [&](const TeamRecord& record) {
    return record.copy == copy && record.size == ranks.size() &&
           std::equal(ranks.begin(), ranks.end(), record.ranks);
  };
  return static_cast<uint32_t>(std::find_if(control.teams, control.teams + count, same) -
                               control.teams);
}

void CheckTeam(const Control& control, const std::vector<int>& ranks) {
  static_assert(kMaxRanks <= 64, "a bit for each rank");
  CheckRanks(control.num_ranks, ranks.data(), ranks.data() + ranks.size(), "a team of ");
}

/*! \brief Throw if there is no room for one more team of these ranks. */
void CheckRoom(const Control& control, uint32_t count, const std::vector<int>& ranks) {
  if (count == kMaxTeams) {
    Fail(kind::kRuntime, "the session already has ", kMaxTeams, " teams, the maximum");
  }
  for (int rank : ranks) {
    if (control.ranks[rank].team_slots.load(std::memory_order_relaxed) ==
        kMaxTeamSlots - kFirstTeam) {
      Fail(kind::kRuntime, "rank ", rank, " is already in ", kMaxTeamSlots - kFirstTeam,
           " teams, the maximum; teams live as long as the session");
    }
  }
}

/*!
 * \brief Wait until this node knows all teams that exist now.
 * \param ranks The ranks of a team to create first; empty to create none.
 */
void RequestTeams(const Rank& rank, const std::vector<int>& ranks, uint64_t copy) {
  Control& control = rank.control();
  RankState& state = control.ranks[rank.id()];
  const uint32_t request =
      rank.SendTeamRequest(AsBytes(copy) + std::string(ranks.begin(), ranks.end()));
  switch (WaitFor(state.answers, request, state.answers_sleepers, control.abort,
                  rank.options().wait, rank.options().deadline)) {
    case WaitResult::kReached:
      return;
    case WaitResult::kAborted:
      Fail(kind::kPeer, "the creation of a team was stopped: ", DescribeAbort(control));
    case WaitResult::kDeadline:
      Fail(kind::kDeadline, "rank ", rank.id(), " waited ",
           std::chrono::duration<double>(rank.options().deadline).count(),
           " s for the controller to send a team to ",
           DescribeNode(control, control.NodeOf(rank.id())),
           "; raise the timeout (TVM_IPC_TIMEOUT) if the network needs longer");
  }
}

}  // namespace

TeamId TeamOf(Control& control, const std::vector<int>& ranks, uint32_t copy) {
  CheckTeam(control, ranks);
  const uint32_t created = control.num_teams.load(std::memory_order_acquire);
  uint32_t index = IndexOf(control, created, ranks, copy);
  if (index < created) return UserTeamId(index);
  MakerLock lock(control);
  const uint32_t count = control.num_teams.load(std::memory_order_relaxed);
  index = IndexOf(control, count, ranks, copy);  // another thread may have created it meanwhile
  if (index < count) return UserTeamId(index);
  CheckRoom(control, count, ranks);
  TeamRecord& record = control.teams[count];
  record.copy = copy;
  record.size = static_cast<uint32_t>(ranks.size());
  for (size_t i = 0; i < ranks.size(); ++i) {
    record.ranks[i] = static_cast<uint8_t>(ranks[i]);
    record.slots[i] = static_cast<uint8_t>(
        kFirstTeam + control.ranks[ranks[i]].team_slots.fetch_add(1, std::memory_order_release));
  }
  // A thread that sees the new count (acquire) sees the record.
  control.num_teams.store(count + 1, std::memory_order_release);
  return UserTeamId(count);
}

TeamId TeamOf(const Rank& rank, const std::vector<int>& ranks, uint32_t copy) {
  Control& control = rank.control();
  if (control.num_nodes == 0) return TeamOf(control, ranks, copy);
  CheckTeam(control, ranks);
  for (bool requested = false;; requested = true) {
    const uint32_t count = control.num_teams.load(std::memory_order_acquire);
    const uint32_t index = IndexOf(control, count, ranks, copy);
    if (index < count) return UserTeamId(index);
    CheckRoom(control, count, ranks);  // the controller has no more room than this node
    if (requested)
      Fail(kind::kRuntime, "the controller did not create a team of ",
           ListOf(ranks.data(), ranks.data() + ranks.size()));
    RequestTeams(rank, ranks, copy);
  }
}

TeamId TeamIn(const Rank& rank, const std::vector<int64_t>& division) {
  const int64_t* numbers = division.data();
  const int64_t* end = numbers + division.size();
  const int64_t size = division.empty() ? 0 : *numbers;
  if (size < 1 || division.size() < 2 || (division.size() - 1) % size != 0) {
    Fail(kind::kValue,
         "teams in a call are the size of the teams, then the ranks of each team in turn;"
         " got ",
         ListOf(numbers, end));
  }
  const int64_t* ranks = numbers + 1;
  const char* what = "teams of the ranks ";
  // The ranks of all teams: otherwise only some ranks would fail, and the others wait for them.
  CheckRanks(rank.num_ranks(), ranks, end, what);
  const int64_t* own = std::find(ranks, end, rank.id());
  if (own == end) return kNoTeam;
  const int64_t* first = ranks + (own - ranks) / size * size;
  return TeamOf(rank, {first, first + size}, 0);
}

const TeamRecord* FindTeam(const Rank& rank, TeamId team) {
  const Control& control = rank.control();
  const TeamRecord* record = FindTeam(control, team);
  const bool possible = team >= kFirstTeam && team < kFirstTeam + static_cast<int>(kMaxTeams);
  if (record != nullptr || control.num_nodes == 0 || !possible) return record;
  RequestTeams(rank, {}, 0);
  return FindTeam(control, team);
}

std::vector<int> UnpackRanks(const std::string& bytes) {
  std::vector<int> ranks;
  for (unsigned char rank : bytes) ranks.push_back(rank);
  return ranks;
}

const TeamRecord* FindTeam(const Control& control, TeamId team) {
  const uint32_t count = control.num_teams.load(std::memory_order_acquire);
  if (team < kFirstTeam || static_cast<uint32_t>(team - kFirstTeam) >= count) return nullptr;
  return &control.teams[team - kFirstTeam];
}

}  // namespace tvm_ipc
