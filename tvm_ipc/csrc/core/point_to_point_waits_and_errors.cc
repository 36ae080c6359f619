/* SPDX-License-Identifier: Apache-2.0 */
/*! \file point_to_point_waits_and_errors.cc */
#include "core/point_to_point_waits_and_errors.h"

#include <chrono>

#include "core/collective_step_barrier.h"
#include "core/error.h"
#include "core/wait.h"

namespace tvm_ipc {

void AwaitMessage(Rank& rank, const std::atomic<uint32_t>& word, uint32_t step,
                  std::atomic<uint32_t>& sleepers, const Descriptor& mine, const char* verb,
                  int peer) {
  Control& control = rank.control();
  switch (
      WaitFor(word, step, sleepers, control.abort, rank.options().wait, rank.options().deadline)) {
    case WaitResult::kReached:
      return;
    case WaitResult::kAborted:
      Fail(kind::kPeer, verb, " rank ", peer, ", ", Describe(mine),
           ", was stopped: ", DescribeAbort(control));
    case WaitResult::kDeadline:
      FailLateMessage(rank, mine, verb, peer);
  }
}

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

}  // namespace tvm_ipc
