/* SPDX-License-Identifier: Apache-2.0 */
/*! \file endpoint_and_backend.cc */
#include "shm/endpoint_and_backend.h"

#include <utility>

#include "core/rank_runtime_state.h"
#include "shm/collectives.h"
#include "shm/select_kernels_by_instruction_set.h"

namespace tvm_ipc {

namespace {

/*! \brief DLPack's kDLCPU. */
constexpr int32_t kCPU = 1;

class SharedMemoryEndpoint final : public Endpoint {
 public:
  explicit SharedMemoryEndpoint(Rank& rank)
      : rank_(rank), heap_(std::make_shared<ArenaHeap>(rank.arena(), rank.arena_base())) {}

  const std::shared_ptr<Heap>& heap() const final { return heap_; }

  void AllReduce(const Buffer& send, ReduceKind kind, TeamId team, Strategy strategy, uint8_t flags,
                 const Buffer& recv) final {
    tvm_ipc::AllReduce(rank_, send, kind, team, strategy, flags, recv);
    Arrive(team, [&](size_t n) { return 2 * recv.bytes() / n * (n - 1); });
  }
  void AllReduceNorm(const Buffer& send, const Buffer& residual, const Norm& norm, TeamId team,
                     Strategy strategy, uint8_t flags, const Buffer& residual_out,
                     const Buffer& norm_out) final {
    tvm_ipc::AllReduceNorm(rank_, send, residual, norm, team, strategy, flags, residual_out,
                           norm_out);
    Arrive(team, [&](size_t n) { return 2 * send.bytes() / n * (n - 1); });
  }
  void ReduceScatter(const Buffer& send, ReduceKind kind, TeamId team, uint8_t flags,
                     const Buffer& recv) final {
    tvm_ipc::ReduceScatter(rank_, send, kind, team, flags, recv);
    Arrive(team, [&](size_t n) { return recv.bytes() * (n - 1); });
  }
  void Reduce(const Buffer& send, ReduceKind kind, int root, TeamId team, uint8_t flags,
              const Buffer* recv) final {
    tvm_ipc::Reduce(rank_, send, kind, root, team, flags, recv);
    Arrive(team, [&](size_t) { return recv == nullptr ? 0 : recv->bytes(); });
  }
  void AllToAll(const Buffer& send, const SplitCounts& parts, TeamId team, uint8_t flags,
                const Buffer& recv) final {
    tvm_ipc::AllToAll(rank_, send, parts, team, flags, recv);
    Arrive(team, [&](size_t n) { return recv.bytes() / n * (n - 1); });
  }
  void Permute(const Buffer& send, const Sources& sources, TeamId team, uint8_t flags,
               const Buffer& recv) final {
    tvm_ipc::Permute(rank_, send, sources, team, flags, recv);
    Arrive(team, [&](size_t) { return recv.bytes(); });
  }
  void AllGather(const Buffer& send, TeamId team, uint8_t flags, const Buffer& recv) final {
    tvm_ipc::AllGather(rank_, send, team, flags, recv);
    Arrive(team, [&](size_t) { return recv.bytes() - send.bytes(); });
  }
  void Broadcast(const Buffer* send, int root, TeamId team, uint8_t flags,
                 const Buffer& recv) final {
    tvm_ipc::Broadcast(rank_, send, root, team, flags, recv);
    Arrive(team, [&](size_t) { return recv.bytes(); });
  }
  void Scatter(const Buffer* send, int root, TeamId team, uint8_t flags, const Buffer& recv) final {
    tvm_ipc::Scatter(rank_, send, root, team, flags, recv);
    Arrive(team, [&](size_t) { return recv.bytes(); });
  }
  void Gather(const Buffer& send, int root, TeamId team, uint8_t flags, const Buffer* recv) final {
    tvm_ipc::Gather(rank_, send, root, team, flags, recv);
    Arrive(team, [&](size_t) { return recv == nullptr ? 0 : recv->bytes() - send.bytes(); });
  }
  void Send(const Buffer& send, int receiver) final { tvm_ipc::Send(rank_, send, receiver); }
  void Receive(const Buffer& recv, int sender) final {
    tvm_ipc::Receive(rank_, recv, sender);
    if (rank_.link().on()) rank_.link().Travel(recv.bytes());
  }

  ExposedBuffer Expose(const Buffer& tensor, TeamId team, std::shared_ptr<const void> keep) final {
    return tvm_ipc::Expose(rank_, tensor, team, std::move(keep));
  }
  PeerMemory PeerView(ExposedBuffer& exposed, int64_t shift) final {
    return tvm_ipc::PeerView(rank_, exposed, shift);
  }
  void Release(TeamId team, const std::vector<const ExposedBuffer*>& exposed) final {
    tvm_ipc::Release(rank_, team, exposed);
  }
  void ReduceSlices(ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                    const Buffer& recv) final {
    tvm_ipc::ReduceSlices(rank_, kind, team, parts, recv);
  }

  void Copy(const Buffer& source, const Buffer& target) final {
    CopyBytes(target.begin(), source.begin(), source.bytes(), source.bytes() >= kStreamBytes);
  }
  /*! \brief Return at once: nothing is in flight when a collective returns. */
  void Synchronise() final {}

 private:
  /*! \brief Delay received bytes as the emulated link would; the number depends on the team size.
   */
  template <typename Bytes>
  void Arrive(TeamId team, const Bytes& bytes) {
    if (!rank_.link().on()) return;
    const int size = rank_.SizeOf(team);
    if (size > 1) rank_.link().Travel(bytes(static_cast<size_t>(size)));
  }

  Rank& rank_;
  std::shared_ptr<Heap> heap_;
};

class SharedMemoryBackend final : public Backend {
 public:
  const char* name() const final { return "shm"; }
  Capabilities capabilities() const final { return {kCPU, true}; }

  /*! \brief Make the ranks' segments (shared_memory_layout.h). */
  std::vector<File> Prepare(const Control& control) const final {
    std::vector<File> files;
    for (int i = 0; i < control.ranks_here; ++i) {
      files.push_back(MakeMemoryFile("tvm_ipc segment", ArenaStart(control) + control.arena_bytes));
    }
    return files;
  }

  std::unique_ptr<Endpoint> Start(Rank& rank) const final {
    return std::make_unique<SharedMemoryEndpoint>(rank);
  }

  bool Reduces(ElementType type, ReduceKind kind) const final {
    return FindReduce(type, kind) != nullptr;
  }
  std::vector<std::string> instruction_sets() const final {
    std::vector<std::string> sets;
    const std::string now = InstructionSet();
    for (const char* name : {"avx512bf16", "avx512", "avx2", "portable"}) {
      if (tvm_ipc::UseInstructionSet(name)) sets.push_back(name);
    }
    tvm_ipc::UseInstructionSet(now);
    return sets;
  }
  std::string instruction_set() const final { return InstructionSet(); }
  bool UseInstructionSet(const std::string& name) const final {
    return tvm_ipc::UseInstructionSet(name);
  }
};

}  // namespace

const Backend& SharedMemory() {
  static const SharedMemoryBackend backend;
  return backend;
}

}  // namespace tvm_ipc
