/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernel_errors.cc
 * \brief Errors that kernels report, with the messages that all backends use.
 */
#include <chrono>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/collective_step_barrier.h"
#include "core/point_to_point_waits_and_errors.h"
#include "cuda/cuda_endpoint.h"

namespace tvm_ipc::cuda {

namespace {

OpName NameOf(uint32_t operation) {
  switch (operation) {
#define TVM_IPC_NAME_1(Name) \
  case kernels::k##Name:     \
    return TraitsOf(Collective::k##Name).op;
#define TVM_IPC_NAME(Name, text, relation, mpi, cuda, ...) TVM_IPC_IF_##cuda(TVM_IPC_NAME_1(Name))
    TVM_IPC_COLLECTIVES(TVM_IPC_NAME)
#undef TVM_IPC_NAME
#undef TVM_IPC_NAME_1
    case kernels::kBarrier:
      return "meeting";
    case kernels::kSend:
      return "send";
    case kernels::kExpose:
      return "peer";
    default:
      return "nothing";
  }
}

std::string NameOf(const Rank& rank, int id) {
  const int pid = rank.control().ranks[id].pid.load(std::memory_order_relaxed);
  return Text("rank ", id, " (pid ", pid, ")");
}

std::string Describe(const kernels::Header& header, const Member* member) {
  return tvm_ipc::Describe(DescriptorOf(header, member));
}

}  // namespace

Descriptor DescriptorOf(const kernels::Header& header, const Member* member) {
  Descriptor descriptor;
  descriptor.op = NameOf(header.operation);
  descriptor.reduces =
      header.operation >= kernels::kAllReduce && header.operation <= kernels::kAllReduceLayerNorm;
  descriptor.kind = static_cast<ReduceKind>(kernels::KindOf(header.mode));
  descriptor.strategy = static_cast<int8_t>((header.mode >> 8 & 0xff) - 1);
  descriptor.flags = static_cast<uint8_t>(kernels::FlagsOf(header.mode));
  descriptor.type.code = static_cast<uint8_t>(header.type);
  descriptor.type.bits = static_cast<uint8_t>(header.type >> 8);
  descriptor.type.lanes = static_cast<uint16_t>(header.type >> 16);
  descriptor.count = header.count;
  descriptor.layout_hash = header.parts;
  if (header.root >= 0 && member != nullptr && header.root < member->size) {
    descriptor.root = member->ranks[header.root];
  }
  return descriptor;
}

void FailRecord(const Rank& rank, const kernels::ErrorRecord& record, const Member* member) {
  const int known = member == nullptr ? rank.num_ranks() : member->size;
  const int place = record.member >= 0 && record.member < known ? record.member : 0;
  const int other = member == nullptr ? place : member->ranks[place];
  const std::string where = member == nullptr ? "" : member->where;
  const bool exposed_buffers = record.phase == kernels::kForExposed;
  const bool message = record.phase == kernels::kForCredit || record.phase == kernels::kForMessage;
  const bool sends = record.phase == kernels::kForCredit;
  std::string mine = Describe(record.mine, member);
  if (message) mine = Text(sends ? "send to " : "receive from ", "rank ", other, ", ", mine, ",");
  switch (record.code) {
    case kernels::kMismatch: {
      if (message) {
        FailMessage(rank, other, DescriptorOf(record.theirs, member),
                    DescriptorOf(record.mine, member));
      }
      const std::string theirs = Describe(record.theirs, member);
      Fail(kind::kMismatch, "the ranks disagree", where, ": rank ", rank.id(), " called ", mine,
           "; rank ", other, " called ", theirs);
    }
    case kernels::kAborted:
      Fail(kind::kPeer, mine, where, " was stopped: ", DescribeAbort(rank.control()));
    default:
      break;
  }
  if (message) {
    FailLateMessage(rank, DescriptorOf(record.mine, member), sends ? "send to" : "receive from",
                    other);
  }
  Fail(kind::kDeadline, mine, where, " waited ",
       std::chrono::duration<double>(rank.options().deadline).count(), " s for ",
       NameOf(rank, other), exposed_buffers ? " to show it" : "",
       "; every rank must make the same collective calls in the same order, or raise the timeout"
       " (TVM_IPC_TIMEOUT)");
}

void CudaEndpoint::CheckRecord(const kernels::ErrorRecord& record, Member* member) const {
  const uint32_t code = __atomic_load_n(&record.code, __ATOMIC_ACQUIRE);
  if (code == kernels::kNoError) return;
  if (code == kernels::kMismatch && member != nullptr) Compare(*member, record);
  FailRecord(rank_, record, member);
}

void CudaEndpoint::Compare(Member& member, const kernels::ErrorRecord& record) {
  if (std::exchange(member.compared, true)) return;
  // The other members enter when they check what their own kernels reported, which may be much
  // later.
  constexpr std::chrono::seconds kPatience{2};
  try {
    member.barrier->Enter(DescriptorOf(record.mine, &member), kPatience);
  } catch (const Error& error) {
    if (error.kind() == std::string(kind::kMismatch)) throw;
  }
}

void CudaEndpoint::CheckRecords() {
  std::vector<Member*> members;
  if (std::lock_guard<std::mutex> lock(mutex_); true) {
    for (auto& [barrier, member] : members_) members.push_back(&member);
  }
  // Throw the cause first, before the aborts that it caused in other kernels.
  for (const bool stopped : {false, true}) {
    auto check = [&](const kernels::ErrorRecord& record, Member* member) {
      const uint32_t code = __atomic_load_n(&record.code, __ATOMIC_ACQUIRE);
      if ((code == kernels::kAborted) != stopped) return;
      // Another thread of the rank may be in an operation of the team.
      const InUseFlag in_use(
          member == nullptr || code == kernels::kNoError ? nullptr : &member->barrier->in_use());
      if (in_use.refused()) FailRecord(rank_, record, member);
      CheckRecord(record, member);
    };
    for (Member* member : members) check(*member->record, member);
    check(records_.get()[kTeamSlots], nullptr);
  }
}

}  // namespace tvm_ipc::cuda
