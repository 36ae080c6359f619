/* SPDX-License-Identifier: Apache-2.0 */
/*! \file shows.cc */
#include "core/shows.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/backend.h"
#include "core/error.h"
#include "core/group.h"
#include "core/meeting.h"

namespace tvm_ipc {

namespace {

std::string Describe(const ShownMemory& memory) {
  return Text(memory.count, " x ", Name(memory.type));
}

}  // namespace

Board& Shows::board(int index) const { return meeting_.seat(index).board; }

uint32_t Shows::Show(const ShownMemory& memory, std::shared_ptr<const void> keep,
                     const std::function<void(uint32_t)>& start) {
  const uint32_t number = last_ + 1;
  const uint32_t place = number % kMaxShown;
  if ((open_ >> place & 1) != 0) {
    const int open = __builtin_popcountll(open_);
    Fail(kind::kRuntime, "show", meeting_.Where(), ": tensor ", number,
         " needs the place of tensor ", numbers_[place], ", which is not hidden yet, as ", open,
         " in all are not; a rank can show ", kMaxShown,
         " tensors at a time, so hide them before. One that was dropped without that stays shown");
  }
  if (start) start(number);
  Board& own = board(meeting_.index());
  own.memory[place] = memory;
  numbers_[place] = number;
  keep_[place] = std::move(keep);
  open_ |= uint64_t{1} << place;
  last_ = number;
  Publish(own.last, number, own.sleepers);  // pairs with the acquire in WaitFor
  return number;
}

const ShownMemory& Shows::Of(int index, uint32_t number) const {
  const uint32_t place = number % kMaxShown;
  const ShownMemory& mine = board(meeting_.index()).memory[place];
  Board& other = board(index);
  const ShownMemory& theirs = other.memory[place];
  const RankOptions& options = meeting_.options_;
  switch (WaitFor(other.last, number, other.sleepers, meeting_.control_.abort, meeting_.wait_,
                  options.deadline)) {
    case WaitResult::kReached:
      break;
    case WaitResult::kAborted:
      Fail(kind::kPeer, "peer of ", Describe(mine), meeting_.Where(),
           " was stopped: ", DescribeAbort(meeting_.control_));
    case WaitResult::kDeadline: {
      const uint32_t step = meeting_.step();
      const bool ahead = meeting_.seat(index).slot[(step + 1) & 1].seq == step + 1;
      Fail(kind::kDeadline, "peer of ", Describe(mine), meeting_.Where(), " waited ",
           std::chrono::duration<double>(options.deadline).count(), " s for ",
           meeting_.Name(index, ahead ? step + 1 : step), "; it has shown ", other.last.load(),
           " tensors, and was to show tensor ", number,
           "; every rank must show the same tensors in the same order, or raise the timeout"
           " (TVM_IPC_TIMEOUT)");
    }
  }
  if (theirs.count != mine.count || theirs.type != mine.type) {
    Fail(kind::kMismatch, "the ranks disagree", meeting_.Where(), ": tensor ", number,
         " that rank ", meeting_.rank(meeting_.index()), " shows has ", Describe(mine),
         ", that of rank ", meeting_.rank(index), " has ", Describe(theirs));
  }
  return theirs;
}

void Shows::Hide(std::vector<uint32_t> numbers, const std::function<void()>& met,
                 std::chrono::nanoseconds deadline) {
  // Numbers that are open are apart by less than the places of the board, even where they wrap.
  const uint32_t first = last_ - kMaxShown;
  std::sort(numbers.begin(), numbers.end(),
            [&](uint32_t a, uint32_t b) { return a - first < b - first; });
  Descriptor mine;
  mine.op = "hide";
  mine.count = numbers.size();
  mine.parts = 14695981039346656037u;  // FNV-1a, number by number
  for (uint32_t number : numbers) mine.parts = (mine.parts ^ number) * 1099511628211u;
  meeting_.Enter(mine, deadline.count() != 0 ? deadline : meeting_.options_.deadline);
  if (met) met();
  for (uint32_t number : numbers) {
    open_ &= ~(uint64_t{1} << number % kMaxShown);
    keep_[number % kMaxShown] = nullptr;
  }
}

void Shows::Forget() {
  last_ = 0;
  open_ = 0;
  for (auto& kept : keep_) kept = nullptr;
}

void RequireOpen(const char* operation, const Rank& rank, Meeting& meeting, const Shown& shown) {
  if (shown.session != rank.segments() || shown.rank != rank.id()) {
    Fail(kind::kValue, operation, ": the tensor was shown by rank ", shown.rank,
         shown.session == rank.segments() ? "" : " of another session", ", and this is rank ",
         rank.id(), "; what a rank shows it asks for and hides itself");
  }
  if (shown.generation != meeting.generation()) {
    Fail(kind::kValue, operation, ": the session has recovered from an error since tensor ",
         shown.number, meeting.Where(), " was shown, which has ended that; show it again");
  }
  if (!meeting.shows().IsOpen(shown.number)) {
    Fail(kind::kValue, operation, ": tensor ", shown.number, meeting.Where(),
         " was hidden before; what is shown is read before it is hidden, which is done once");
  }
}

std::vector<uint32_t> NumbersToHide(const Rank& rank, Meeting& meeting, TeamId team,
                                    const std::vector<const Shown*>& all) {
  std::vector<uint32_t> numbers;
  uint64_t seen = 0;
  for (const Shown* shown : all) {
    if (shown->team != team) {
      Fail(kind::kValue, "hide: a tensor was shown to team ", shown->team, ", not to team ", team,
           "; hide what belongs to one team, with that team");
    }
    RequireOpen("hide", rank, meeting, *shown);
    const uint64_t bit = uint64_t{1} << shown->number % kMaxShown;
    if ((seen & bit) != 0) {
      Fail(kind::kValue, "hide: tensor ", shown->number, meeting.Where(), " is there twice");
    }
    seen |= bit;
    numbers.push_back(shown->number);
  }
  return numbers;
}

int PlaceAfter(const Meeting& meeting, int64_t shift) {
  const int64_t size = meeting.size();
  return static_cast<int>(((meeting.index() + shift % size) % size + size) % size);
}

}  // namespace tvm_ipc
