/* SPDX-License-Identifier: Apache-2.0 */
/*! \file backend.cc */
#include "nccl/backend.h"

#include <set>

#include "core/group.h"
#include "driver/device.h"
#include "driver/works.h"
#include "nccl/endpoint.h"
#include "nccl/library.h"
#include "nccl/memory.h"

namespace tvm_ipc {

namespace nccl {

namespace {

/*! \brief The library first: it says what to install. */
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
   * \brief A segment for each rank, with an identity for each of its seats in a team, and on
   * several nodes with a wire, in its place, by which members say what they are about to do.
   */
  std::vector<File> Prepare(const Control& control) const final {
    constexpr size_t kIdentities = kMaxSeats * sizeof(UniqueId);
    static_assert(kIdentities <= WireStart(1), "the wire is behind them");
    const size_t bytes = control.wire_bytes == 0 ? kIdentities : ArenaStart(control);
    std::vector<File> files;
    for (int i = 0; i < control.ranks_here; ++i) {
      files.push_back(MakeMemoryFile("tvm_ipc segment", bytes));
    }
    return files;
  }
  /*! \brief What there is on the device. */
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
  std::vector<std::string> instruction_sets() const final { return {}; }
  std::string instruction_set() const final { return ""; }
  bool UseInstructionSet(const std::string&) const final { return true; }
};

}  // namespace

NcclEndpoint::NcclEndpoint(Rank& rank)
    : rank_(rank),
      communicators_(rank, DeviceOf(rank)),
      heap_(std::make_shared<DeviceHeap>(cuda::Device::Open(rank.options().device),
                                         rank.control().arena_bytes)) {}

std::unique_ptr<Works> NcclEndpoint::MakeWorks() {
  return std::make_unique<cuda::WorksOnStream>(rank_, DeviceOf(rank_));
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
  // Bytes that are set, for a copy would read the number when it is gone, or in a graph's replay.
  const auto at = reinterpret_cast<cuda::Address>(recv.data);
  for (size_t i = 0; i < sizeof(number); ++i) {
    const auto byte = static_cast<unsigned char>(static_cast<uint64_t>(number) >> (8 * i));
    device.driver().cuMemsetD8Async("to write a number", at + i, byte, 1, communicators_.stream());
  }
}

}  // namespace nccl

const Backend& Nccl() {
  static const nccl::NcclBackend backend;
  return backend;
}

}  // namespace tvm_ipc
