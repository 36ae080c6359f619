/* SPDX-License-Identifier: Apache-2.0 */
/*! \file endpoint_and_backend.cc */
#include "shm/endpoint_and_backend.h"

#include "core/check_collective_arguments.h"
#include "core/rank_runtime_state.h"
#include "shm/collectives.h"
#include "shm/select_kernels_by_instruction_set.h"

namespace tvm_ipc {

SharedMemoryEndpoint::SharedMemoryEndpoint(Rank& rank)
    : rank_(rank), heap_(std::make_shared<ArenaHeap>(rank.arena(), rank.arena_base())) {}

void SharedMemoryEndpoint::Run(const Call& call) {
  using Kernel = void (*)(Team& team, const Call& call);
  static constexpr Kernel kKernels[] = {
#define TVM_IPC_KERNEL(Name, ...) &Name,
      TVM_IPC_COLLECTIVES(TVM_IPC_KERNEL)
#undef TVM_IPC_KERNEL
  };
  Check(rank_, call);
  int size = 0;
  int index = 0;
  {
    Team team(rank_, call.team);
    size = team.size();
    index = team.index();
    KernelOf(kKernels, call)(team, call);
  }
  const size_t bytes = CountBytes(call, size, index);
  if (size > 1 && rank_.link().on()) rank_.link().Travel(bytes);
}

void SharedMemoryEndpoint::Copy(const Buffer& source, const Buffer& target) {
  CopyBytes(target.begin(), source.begin(), source.bytes(), source.bytes() >= kStreamBytes);
}

Capabilities SharedMemoryBackend::capabilities() const {
  constexpr int32_t kCPU = 1;  // DLPack's kDLCPU
  return {kCPU, true};
}

/*! \brief Make the ranks' segments (shared_memory_layout.h). */
std::vector<File> SharedMemoryBackend::Prepare(const Control& control) const {
  std::vector<File> files;
  for (int i = 0; i < control.ranks_here; ++i) {
    files.push_back(MakeMemoryFile("tvm_ipc segment", ArenaStart(control) + control.arena_bytes));
  }
  return files;
}

std::unique_ptr<Endpoint> SharedMemoryBackend::Start(Rank& rank) const {
  return std::make_unique<SharedMemoryEndpoint>(rank);
}

bool SharedMemoryBackend::Reduces(ElementType type, ReduceKind kind) const {
  return FindReduce(type, kind) != nullptr;
}

std::vector<std::string> SharedMemoryBackend::instruction_sets() const {
  std::vector<std::string> sets;
  const std::string now = InstructionSet();
  for (const char* name : {"avx512bf16", "avx512", "avx2", "portable"}) {
    if (tvm_ipc::UseInstructionSet(name)) sets.push_back(name);
  }
  tvm_ipc::UseInstructionSet(now);
  return sets;
}

std::string SharedMemoryBackend::instruction_set() const { return InstructionSet(); }

bool SharedMemoryBackend::UseInstructionSet(const std::string& name) const {
  return tvm_ipc::UseInstructionSet(name);
}

const Backend& SharedMemory() {
  static const SharedMemoryBackend backend;
  return backend;
}

}  // namespace tvm_ipc
