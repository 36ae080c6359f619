/* SPDX-License-Identifier: Apache-2.0 */
/*! \file endpoint_and_backend.cc */
#include "nccl/endpoint_and_backend.h"

#include <set>

#include "core/check_collective_arguments.h"
#include "core/rank_runtime_state.h"
#include "driver/comm_stream_async_queue.h"
#include "driver/device_properties_and_context.h"
#include "nccl/collectives_endpoint.h"
#include "nccl/ipc_scope_heap_without_peers.h"
#include "nccl/library.h"
#include "nccl/team_operation.h"

namespace tvm_ipc {

namespace nccl {

namespace {

using Kernel = void (*)(Team& team, const Call& call);

/*! \brief Return the device. Load NCCL first, because its error reports what to install. */
std::shared_ptr<cuda::Device> DeviceOf(const Rank& rank) {
  TheLibrary();
  return cuda::Device::Open(rank.options().device);
}

class NcclBackend final : public Backend {
 public:
  const char* name() const final { return "nccl"; }
  Capabilities capabilities() const final {
    Capabilities capabilities{cuda::kDeviceType, false};
    capabilities.streams = true;
    return capabilities;
  }

  /*!
   * \brief Return a segment for each rank, with a UniqueId for each of its team slots. With several
   *        nodes it also has an internode ring, over which members announce their next operation.
   */
  std::vector<File> Prepare(const Control& control) const final {
    constexpr size_t kIdentities = kMaxTeamSlots * sizeof(UniqueId);
    static_assert(kIdentities <= RingStart(1), "the internode ring follows them");
    const size_t bytes = control.ring_bytes == 0 ? kIdentities : ArenaStart(control);
    std::vector<File> files;
    for (int i = 0; i < control.ranks_here; ++i) {
      files.push_back(MakeMemoryFile("tvm_ipc segment", bytes));
    }
    return files;
  }
  /*! \brief Return 0: the arena may use all memory of the device. */
  size_t DefaultArena(int) const final { return 0; }
  std::string Refusal(const std::vector<int>& devices) const final {
    try {
      TheLibrary();
      std::set<int> seen;
      for (int device : devices) {
        const cuda::DeviceFacts facts = cuda::FactsOf(device);
        if (!seen.insert(device).second) {
          return Text("NCCL wants a device for each worker, and two would share cuda:", device,
                      " (", facts.name, ")");
        }
      }
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }
  void UseLibrary(const std::string& path) const final { nccl::UseLibrary(path); }
  LibraryFacts FactsOfLibrary() const final {
    try {
      return {TheLibrary().version(), TheLibrary().path(), ""};
    } catch (const Error& error) {
      return {0, "", error.what()};
    }
  }

  std::unique_ptr<Endpoint> Start(Rank& rank) const final {
    return std::make_unique<NcclEndpoint>(rank);
  }

  bool Reduces(ElementType type, ReduceKind kind) const final {
    Type nccl_type;
    Operator nccl_operator;
    const char* why;
    return FindReduction(type, kind, &nccl_type, &nccl_operator, &why);
  }
};

}  // namespace

NcclEndpoint::NcclEndpoint(Rank& rank)
    : rank_(rank),
      communicators_(rank, DeviceOf(rank)),
      heap_(std::make_shared<DeviceHeap>(cuda::Device::Open(rank.options().device),
                                         rank.control().arena_bytes)),
      compute_streams_(cuda::Device::Open(rank.options().device)) {}

void NcclEndpoint::Run(const Call& call) {
  static constexpr Kernel kKernels[] = {
#define TVM_IPC_KERNEL(Name, text, relation, mpi, cuda, nccl, ...) Kernel{TVM_IPC_IF_##nccl(&Name)},
      TVM_IPC_COLLECTIVES(TVM_IPC_KERNEL)
#undef TVM_IPC_KERNEL
  };
  Check(rank_, call);
  Team team(communicators_, call.team);
  KernelOf(kKernels, call)(team, call);
}

std::unique_ptr<AsyncQueue> NcclEndpoint::MakeAsyncQueue() {
  const std::shared_ptr<cuda::Device> device = DeviceOf(rank_);
  return std::make_unique<cuda::StreamAsyncQueue>(rank_, device,
                                                  std::make_shared<cuda::OwnStream>(device));
}

void NcclEndpoint::Copy(const Buffer& source, const Buffer& target) {
  if (source.bytes() == 0 || source.data == target.data) return;
  const cuda::Device& device = communicators_.device();
  const cuda::Here here(device);
  device.driver().cuMemcpyAsync("to copy on a device", reinterpret_cast<cuda::Address>(target.data),
                                reinterpret_cast<cuda::Address>(source.data), source.bytes(),
                                communicators_.stream());
}

void NcclEndpoint::WriteNumber(int64_t number, const Buffer& recv) {
  const cuda::Device& device = communicators_.device();
  const cuda::Here here(device);
  // Set the bytes instead of copying the number: a copy would read it after this call has returned,
  // or when a graph is replayed.
  const auto at = reinterpret_cast<cuda::Address>(recv.data);
  for (size_t i = 0; i < sizeof(number); ++i) {
    const auto byte = static_cast<unsigned char>(static_cast<uint64_t>(number) >> (8 * i));
    device.driver().cuMemsetD8Async("to write a number", at + i, byte, 1, communicators_.stream());
  }
}

void NcclEndpoint::Clear(const Buffer& recv) {
  if (recv.bytes() == 0) return;
  const cuda::Device& device = communicators_.device();
  const cuda::Here here(device);
  device.driver().cuMemsetD8Async("to clear a result", reinterpret_cast<cuda::Address>(recv.data),
                                  0, recv.bytes(), communicators_.stream());
}

}  // namespace nccl

const Backend& Nccl() {
  static const nccl::NcclBackend backend;
  return backend;
}

}  // namespace tvm_ipc
