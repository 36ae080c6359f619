/* SPDX-License-Identifier: Apache-2.0 */
/*! \file meeting.cc */
#include "core/meeting.h"

#include <cstring>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "core/teams.h"
#include "core/trace.h"

namespace tvm_ipc {

Meeting::Meeting(Control& control, TeamId team, std::vector<int> ranks,
                 const std::vector<int>& places, int me, const RankOptions& options,
                 const WaitPolicy& wait)
    : control_(control),
      options_(options),
      wait_(wait),
      me_(me),
      team_(team),
      generation_(control.generation.load(std::memory_order_acquire)),
      shows_(*this) {
  named_ = ranks;
  for (size_t i = 0; i < ranks.size(); ++i) {
    members_.push_back({&control.seats[places[i]][ranks[i]], ranks[i], places[i]});
    here_ = here_ && control.IsHere(ranks[i]);
  }
}

void Meeting::SkipTo(uint32_t step) {
  step_ = step;
  for (Slot& slot : seat(me_).slot) slot.seq.store(step, std::memory_order_relaxed);
}

void Meeting::Enter(const Descriptor& mine, std::chrono::nanoseconds deadline) {
  const uint32_t step = ++step_;
  Seat& own = seat(me_);
  Slot& slot = own.slot[step & 1];
  slot.descriptor = mine;
  Trace("publish", rank(me_), step & 1);
  Publish(slot.seq, step, own.sleepers);  // pairs with the acquire in WaitFor
  bool agree = true;
  for (int i = 0; i < size(); ++i) {
    if (i == me_) continue;
    Seat& other = seat(i);
    const Slot& theirs = other.slot[step & 1];
    switch (WaitFor(theirs.seq, step, other.sleepers, control_.abort, wait_, deadline)) {
      case WaitResult::kReached:
        Trace("see", rank(i), step & 1);
        break;
      case WaitResult::kAborted:
        Fail(kind::kPeer, Describe(mine), Where(), " was stopped: ", DescribeAbort(control_));
      case WaitResult::kDeadline:
        FailDeadline(mine);
    }
    agree = agree && theirs.descriptor.Agrees(mine);
  }
  if (!agree) FailMismatch();
}

void Meeting::FailDeadline(const Descriptor& mine) const {
  std::ostringstream missing;
  const char* separator = "";
  for (int i = 0; i < size(); ++i) {
    const Seat& other = seat(i);
    if (Reached(other.slot[step_ & 1].seq.load(std::memory_order_acquire), step_)) continue;
    missing << separator << Name(i, step_ - 1);
    separator = "; ";
  }
  Fail(kind::kDeadline, Describe(mine), Where(), " waited ",
       std::chrono::duration<double>(options_.deadline).count(), " s for ", missing.str(),
       "; every rank must make the same collective calls in the same order, or raise the timeout"
       " (TVM_IPC_TIMEOUT)");
}

std::string Meeting::Name(int index, uint32_t step) const {
  std::string text = Text("rank ", rank(index), " (pid ",
                          control_.ranks[rank(index)].pid.load(std::memory_order_relaxed), ")");
  const Slot& slot = seat(index).slot[step & 1];
  if (step != 0 && slot.seq.load(std::memory_order_acquire) == step) {
    text += ", last seen in " + Describe(slot.descriptor);
  }
  return text;
}

void Meeting::FailMismatch() const {
  std::ostringstream os;
  os << "the ranks disagree" << Where();
  const char* separator = ": ";
  for (int i = 0; i < size(); ++i) {
    os << separator << "rank " << rank(i) << " called " << Describe(shown(i));
    separator = "; ";
  }
  throw Error(kind::kMismatch, os.str());
}

std::string Meeting::Where() const {
  if (team_ == kWorld) return "";
  std::string text = team_ == kGroup ? " in the group" : Text(" in team ", team_);
  const char* separator = " (ranks ";
  for (int named : named_) {
    text += separator + std::to_string(named);
    separator = ", ";
  }
  return text + ")";
}

std::string DescribeNode(const Control& control, int node) {
  const NodeRecord& record = control.nodes[node];
  const std::string name(record.name, strnlen(record.name, sizeof(record.name)));
  const int last = record.first + record.ranks - 1;
  if (last == record.first) return Text("node ", name, " (rank ", last, ")");
  return Text("node ", name, " (ranks ", record.first, " to ", last, ")");
}

std::string DescribeAbort(const Control& control) {
  const uint32_t word = control.abort.load(std::memory_order_acquire);
  const int rank = static_cast<int>(word >> 8);
  auto place = [&] {
    const int node = control.NodeOf(rank);
    return node < 0 ? "" : Text(" on node ", control.nodes[node].name);
  };
  switch (static_cast<AbortReason>(word & 0xff)) {
    case AbortReason::kFailed:
      return Text("rank ", rank, place(), " failed; its own error says why");
    case AbortReason::kDied:
      return Text("rank ", rank, " (pid ", control.ranks[rank].pid.load(), place(), ") died");
    case AbortReason::kNodeLost:
      return DescribeNode(control, rank) + " is lost; the controller's error says why";
    case AbortReason::kControllerLost:
      return "this node's connection to the controller is lost";
    case AbortReason::kClosed:
      return "the session was closed";
    case AbortReason::kNone:
      break;
  }
  return "the session has recovered since";
}

uint64_t HashOf(const std::vector<int64_t>& numbers) {
  if (numbers.empty()) return 0;
  uint64_t hash = 14695981039346656037u;  // FNV-1a, number by number
  for (int64_t number : numbers) hash = (hash ^ static_cast<uint64_t>(number)) * 1099511628211u;
  return hash | 1;
}

std::string Describe(const Descriptor& d) {
  if (d.op == OpName("launch")) {
    return "the launch of kernels together, as of workers that are threads (docs/gpus.md)";
  }
  if (d.op == OpName("hide")) {
    return Text("hide of ", d.count, " tensors that it showed, whose numbers have the hash ",
                d.parts);
  }
  std::ostringstream os;
  os << d.op.text;
  const char* separator = "(";
  auto detail = [&](auto&&... words) {
    os << separator;
    (os << ... << words);
    separator = ", ";
  };
  if (d.reduces) detail(Name(d.kind));
  if (d.strategy >= 0) detail("strategy ", static_cast<int>(d.strategy));
  if (d.reduces || d.flags != 0) detail("flags ", static_cast<int>(d.flags));
  if (d.parts != 0) detail("parts with hash ", std::hex, d.parts, std::dec);
  if (*separator == ',') os << ")";
  if (d.root >= 0) os << " from/to rank " << d.root;
  os << " of " << d.count << " x " << Name(d.type);
  return os.str();
}

}  // namespace tvm_ipc
