/* SPDX-License-Identifier: Apache-2.0 */
/*! \file teams.cc */
#include "core/teams.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "core/error.h"
#include "core/group.h"
#include "core/meeting.h"
#include "core/wait.h"

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

template <typename Number>
std::string Show(const Number* begin, const Number* end) {
  std::string text;
  for (; begin != end; ++begin) text += (text.empty() ? "" : ", ") + std::to_string(*begin);
  return "[" + text + "]";
}

/*! \param what The beginning of an error, which goes on with the ranks. */
template <typename Number>
void CheckRanks(int num_ranks, const Number* begin, const Number* end, const char* what) {
  if (begin == end) Fail(kind::kValue, "a team has at least one rank");
  uint64_t seen = 0;
  for (const Number* rank = begin; rank != end; ++rank) {
    if (*rank < 0 || *rank >= num_ranks) {
      Fail(kind::kValue, what, Show(begin, end), ": there is no rank ", *rank, " among ", num_ranks,
           " workers");
    }
    if ((seen >> *rank & 1) != 0) {
      Fail(kind::kValue, what, Show(begin, end), ": rank ", *rank, " is there twice");
    }
    seen |= uint64_t{1} << *rank;
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

void CheckTeam(const Control& control, const std::vector<int>& ranks) {
  static_assert(kMaxRanks <= 64, "a bit for each rank");
  CheckRanks(control.num_ranks, ranks.data(), ranks.data() + ranks.size(), "a team of ");
}

/*! \brief Throw where one more team of these ranks would be too many. */
void CheckRoom(const Control& control, uint32_t count, const std::vector<int>& ranks) {
  if (count == kMaxTeams) {
    Fail(kind::kRuntime, "the session has ", kMaxTeams, " teams already, the most there can be");
  }
  for (int rank : ranks) {
    if (control.ranks[rank].seats.load(std::memory_order_relaxed) == kMaxSeats - kFirstTeam) {
      Fail(kind::kRuntime, "rank ", rank, " is in ", kMaxSeats - kFirstTeam,
           " teams already, the most there can be; teams live as long as the session");
    }
  }
}

/*!
 * \brief Wait until this node knows all teams that there are now.
 * \param ranks Of a team that is to be among them; none if it is there, if it is one at all.
 */
void AskForTeams(const Rank& rank, const std::vector<int>& ranks, uint64_t copy) {
  Control& control = rank.control();
  RankState& state = control.ranks[rank.id()];
  const uint32_t question = rank.Ask(AsBytes(copy) + std::string(ranks.begin(), ranks.end()));
  switch (WaitFor(state.answers, question, state.answers_sleepers, control.abort,
                  rank.options().wait, rank.options().deadline)) {
    case WaitResult::kReached:
      return;
    case WaitResult::kAborted:
      Fail(kind::kPeer, "the making of a team was stopped: ", DescribeAbort(control));
    case WaitResult::kDeadline:
      Fail(kind::kDeadline, "rank ", rank.id(), " waited ",
           std::chrono::duration<double>(rank.options().deadline).count(),
           " s for the controller to tell ", DescribeNode(control, control.NodeOf(rank.id())),
           " of a team; raise the timeout (TVM_IPC_TIMEOUT) if the network needs longer");
  }
}

}  // namespace

TeamId TeamOf(Control& control, const std::vector<int>& ranks, uint32_t copy) {
  CheckTeam(control, ranks);
  const uint32_t known = control.num_teams.load(std::memory_order_acquire);
  uint32_t index = IndexOf(control, known, ranks, copy);
  if (index < known) return MadeTeam(index);
  MakerLock lock(control);
  const uint32_t count = control.num_teams.load(std::memory_order_relaxed);
  index = IndexOf(control, count, ranks, copy);  // somebody else may have made it meanwhile
  if (index < count) return MadeTeam(index);
  CheckRoom(control, count, ranks);
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

TeamId TeamOf(const Rank& rank, const std::vector<int>& ranks, uint32_t copy) {
  Control& control = rank.control();
  if (control.num_nodes == 0) return TeamOf(control, ranks, copy);
  CheckTeam(control, ranks);
  for (bool asked = false;; asked = true) {
    const uint32_t known = control.num_teams.load(std::memory_order_acquire);
    const uint32_t index = IndexOf(control, known, ranks, copy);
    if (index < known) return MadeTeam(index);
    CheckRoom(control, known, ranks);  // there is no more at the controller than here
    if (asked)
      Fail(kind::kRuntime, "the controller did not make a team of ",
           Show(ranks.data(), ranks.data() + ranks.size()));
    AskForTeams(rank, ranks, copy);
  }
}

TeamId TeamIn(const Rank& rank, const std::vector<int64_t>& division) {
  const int64_t* numbers = division.data();
  const int64_t* end = numbers + division.size();
  const int64_t size = division.empty() ? 0 : *numbers;
  if (size < 1 || division.size() < 2 || (division.size() - 1) % size != 0) {
    Fail(kind::kValue,
         "ranks are divided into teams by the size of the teams, and then the ranks"
         " of team after team; not by ",
         Show(numbers, end));
  }
  const int64_t* ranks = numbers + 1;
  const char* what = "teams of the ranks ";
  // Those of other teams too: else some ranks would be told, and the others wait for them.
  CheckRanks(rank.num_ranks(), ranks, end, what);
  const int64_t* found = std::find(ranks, end, rank.id());
  if (found == end) Fail(kind::kValue, what, Show(ranks, end), ": rank ", rank.id(), " is in none");
  const int64_t* first = ranks + (found - ranks) / size * size;
  return TeamOf(rank, {first, first + size}, 0);
}

const TeamRecord* FindTeam(const Rank& rank, TeamId team) {
  const Control& control = rank.control();
  const TeamRecord* known = FindTeam(control, team);
  const bool possible = team >= kFirstTeam && team < kFirstTeam + static_cast<int>(kMaxTeams);
  if (known != nullptr || control.num_nodes == 0 || !possible) return known;
  AskForTeams(rank, {}, 0);
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
