/* SPDX-License-Identifier: Apache-2.0 */
/*! \file collective_step_barrier.cc */
#include "core/collective_step_barrier.h"

#include <cstring>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "core/protocol_trace_test_hook.h"
#include "core/teams.h"

namespace tvm_ipc {

TeamBarrier::TeamBarrier(Control& control, TeamId team, std::vector<int> ranks,
                         const std::vector<int>& slots, int me, const RankOptions& options,
                         const WaitPolicy& wait)
    : control_(control),
      options_(options),
      wait_(wait),
      me_(me),
      team_(team),
      generation_(control.generation.load(std::memory_order_acquire)),
      exposed_buffers_(*this) {
  named_ = ranks;
  for (size_t i = 0; i < ranks.size(); ++i) {
    members_.push_back({&control.team_slots[slots[i]][ranks[i]], ranks[i], slots[i]});
    here_ = here_ && control.IsHere(ranks[i]);
  }
}

void TeamBarrier::SkipTo(uint32_t step) {
  step_ = step;
  for (Slot& slot : team_slot(me_).slot) slot.seq.store(step, std::memory_order_relaxed);
}

void TeamBarrier::Enter(const Descriptor& mine, std::chrono::nanoseconds deadline) {
  const uint32_t step = ++step_;
  TeamSlot& own = team_slot(me_);
  Slot& slot = own.slot[step & 1];
  slot.descriptor = mine;
  Trace("publish", rank(me_), step & 1);
  Publish(slot.seq, step, own.sleepers);  // pairs with the acquire in WaitFor
  bool agree = true;
  for (int i = 0; i < size(); ++i) {
    if (i == me_) continue;
    TeamSlot& other = team_slot(i);
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

void TeamBarrier::CompareStalled(const Descriptor& mine) const {
  const uint32_t step = step_ + 1;
  Slot& own = team_slot(me_).stalled;
  if (own.seq.load(std::memory_order_relaxed) != step) {
    // Peers ignore a descriptor of another step, and none of them is behind this one.
    own.descriptor = mine;
    own.seq.store(step, std::memory_order_release);
  }
  for (int i = 0; i < size(); ++i) {
    if (i == me_) continue;
    const TeamSlot& other = team_slot(i);
    for (const Slot* theirs : {&other.slot[step & 1], &other.stalled}) {
      if (theirs->seq.load(std::memory_order_acquire) != step) continue;
      if (theirs->descriptor.Agrees(mine)) break;
      Fail(kind::kMismatch, "the ranks disagree", Where(), ": rank ", rank(me_), " called ",
           Describe(mine), "; rank ", rank(i), " called ", Describe(theirs->descriptor));
    }
  }
}

void TeamBarrier::FailDeadline(const Descriptor& mine) const {
  std::ostringstream missing;
  const char* separator = "";
  for (int i = 0; i < size(); ++i) {
    const TeamSlot& other = team_slot(i);
    if (Reached(other.slot[step_ & 1].seq.load(std::memory_order_acquire), step_)) continue;
    missing << separator << Name(i, step_ - 1);
    separator = "; ";
  }
  Fail(kind::kDeadline, Describe(mine), Where(), " waited ",
       std::chrono::duration<double>(options_.deadline).count(), " s for ", missing.str(),
       "; every rank must make the same collective calls in the same order, or raise the timeout"
       " (TVM_IPC_TIMEOUT)");
}

std::string TeamBarrier::Name(int index, uint32_t step) const {
  std::string text = Text("rank ", rank(index), " (pid ",
                          control_.ranks[rank(index)].pid.load(std::memory_order_relaxed), ")");
  const Slot& slot = team_slot(index).slot[step & 1];
  if (step != 0 && slot.seq.load(std::memory_order_acquire) == step) {
    text += ", last seen in " + Describe(slot.descriptor);
  }
  return text;
}

void TeamBarrier::FailMismatch() const {
  std::ostringstream os;
  os << "the ranks disagree" << Where();
  const char* separator = ": ";
  for (int i = 0; i < size(); ++i) {
    os << separator << "rank " << rank(i) << " called " << Describe(exposed(i));
    separator = "; ";
  }
  throw Error(kind::kMismatch, os.str());
}

std::string TeamBarrier::Where() const {
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
  const int rank = SubjectOf(word);
  auto location = [&] {
    const int node = control.NodeOf(rank);
    return node < 0 ? "" : Text(" on node ", control.nodes[node].name);
  };
  switch (ReasonOf(word)) {
    case AbortReason::kFailed:
      return Text("rank ", rank, location(), " failed; its own error gives the reason");
    case AbortReason::kDied:
      return Text("rank ", rank, " (pid ", control.ranks[rank].pid.load(), location(), ") died");
    case AbortReason::kNodeLost:
      return DescribeNode(control, rank) + " is lost; the controller's error gives the reason";
    case AbortReason::kControllerLost:
      return "this node's connection to the controller is lost";
    case AbortReason::kClosed:
      return "the session was closed";
    case AbortReason::kNone:
      break;
  }
  return "the session has recovered since";
}

std::string Describe(const Descriptor& d) {
  if (d.op == OpName("launch")) {
    return "the joint launch of kernels, as with workers that are threads (docs/gpus.md)";
  }
  if (d.op == OpName("release")) {
    return Text("release of ", d.count, " tensors that it exposed, whose numbers have the hash ",
                d.layout_hash);
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
  if (d.layout_hash != 0) detail("parts with hash ", std::hex, d.layout_hash, std::dec);
  if (*separator == ',') os << ")";
  if (d.root >= 0) os << " from/to rank " << d.root;
  os << " of " << d.count << " x " << Name(d.type);
  return os.str();
}

}  // namespace tvm_ipc
