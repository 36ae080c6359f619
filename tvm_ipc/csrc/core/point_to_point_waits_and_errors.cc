/* SPDX-License-Identifier: Apache-2.0 */
/*! \file point_to_point_waits_and_errors.cc */
#include "core/point_to_point_waits_and_errors.h"

#include <chrono>

#include "core/collective_step_barrier.h"
#include "core/error.h"
#include "core/wait.h"

namespace tvm_ipc {

void CheckPeer(const Rank& rank, const char* op, int peer) {
  if (peer < 0 || peer >= rank.num_ranks()) {
    Fail(kind::kValue, op, ": there is no rank ", peer, " among ", rank.num_ranks(), " workers");
  }
  if (peer == rank.id()) Fail(kind::kValue, op, ": rank ", peer, " is the caller itself");
}

Descriptor DescribeMessage(const Buffer& buffer) {
  Descriptor descriptor;
  descriptor.op = "send";
  descriptor.type = buffer.type;
  descriptor.count = buffer.count;
  return descriptor;
}

void FailLateMessage(const Rank& rank, const Descriptor& mine, const char* verb, int peer) {
  Fail(kind::kDeadline, verb, " rank ", peer, " (pid ",
       rank.control().ranks[peer].pid.load(std::memory_order_relaxed), "), ", Describe(mine),
       ", waited ", std::chrono::duration<double>(rank.options().deadline).count(),
       " s for it; raise the timeout (TVM_IPC_TIMEOUT) if it needs longer");
}

void FailMessage(const Rank& rank, int sender, const Descriptor& theirs, const Descriptor& mine) {
  Fail(kind::kMismatch, "the ranks disagree: rank ", sender, " called ", Describe(theirs),
       " to rank ", rank.id(), ", which wanted to receive ", mine.count, " x ", Name(mine.type));
}

void MessageEnd::PublishPacket(int64_t offset) {
  Slot& slot = channel_.slot[packet_ & 1];
  slot.descriptor = mine_;
  slot.descriptor.offset = offset;
  Publish(slot.seq, packet_, channel_.receiver_sleeps);
}

Descriptor MessageEnd::AwaitPacket() {
  const Slot& slot = channel_.slot[++packet_ & 1];
  Await(slot.seq, packet_, channel_.receiver_sleeps, "receive from");
  const Descriptor theirs = slot.descriptor;
  if (!theirs.Agrees(mine_)) FailMessage(rank_, peer_, theirs, mine_);
  return theirs;
}

void MessageEnd::PublishTaken() { Publish(channel_.taken, packet_, channel_.sender_sleeps); }

void MessageEnd::AwaitTaken(uint32_t packet) {
  Await(channel_.taken, packet, channel_.sender_sleeps, "send to");
}

void MessageEnd::Await(const std::atomic<uint32_t>& word, uint32_t packet,
                       std::atomic<uint32_t>& sleepers, const char* verb) {
  Control& control = rank_.control();
  const RankOptions& options = rank_.options();
  switch (WaitFor(word, packet, sleepers, control.abort, options.wait, options.deadline)) {
    case WaitResult::kReached:
      return;
    case WaitResult::kAborted:
      Fail(kind::kPeer, verb, " rank ", peer_, ", ", Describe(mine_),
           ", was stopped: ", DescribeAbort(control));
    case WaitResult::kDeadline:
      FailLateMessage(rank_, mine_, verb, peer_);
  }
}

}  // namespace tvm_ipc
