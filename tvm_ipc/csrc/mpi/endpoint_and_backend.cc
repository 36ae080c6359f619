/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file endpoint_and_backend.cc
 * \brief The backend for several nodes. Within a node it uses the CPU backend of one machine; teams
 *        and messages across nodes use the internode ring.
 */
#include "mpi/endpoint_and_backend.h"

#include <optional>
#include <utility>

#include "core/internode_request_queue.h"
#include "core/point_to_point_waits_and_errors.h"
#include "core/rank_runtime_state.h"
#include "mpi/exposed_buffers_sent_to_nodes.h"
#include "mpi/internode_collectives.h"
#include "shm/endpoint_and_backend.h"

namespace tvm_ipc {

namespace {

class NodesEndpoint final : public Endpoint {
 public:
  explicit NodesEndpoint(Rank& rank)
      : rank_(rank), inside_(SharedMemory().Start(rank)), layouts_(rank) {
    if (rank.control().ring_bytes == 0) return;
    ring_.emplace(rank);
    exposed_buffers_.emplace(rank, *ring_);
  }

  const std::shared_ptr<Heap>& heap() const final { return inside_->heap(); }

  void AllReduce(const Buffer& send, ReduceKind kind, TeamId team, Strategy strategy, uint8_t flags,
                 const Buffer& recv) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) return inside_->AllReduce(send, kind, team, strategy, flags, recv);
    internode::AllReduce(To(*layout), send, kind, strategy, flags, recv);
  }
  void AllReduceNorm(const Buffer& send, const Buffer& residual, const Norm& norm, TeamId team,
                     Strategy strategy, uint8_t flags, const Buffer& residual_out,
                     const Buffer& norm_out) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) {
      return inside_->AllReduceNorm(send, residual, norm, team, strategy, flags, residual_out,
                                    norm_out);
    }
    internode::AllReduceNorm(To(*layout), send, residual, norm, strategy, flags, residual_out,
                             norm_out);
  }
  void ReduceScatter(const Buffer& send, ReduceKind kind, TeamId team, uint8_t flags,
                     const Buffer& recv) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) return inside_->ReduceScatter(send, kind, team, flags, recv);
    internode::ReduceScatter(To(*layout), send, kind, flags, recv);
  }
  void Reduce(const Buffer& send, ReduceKind kind, int root, TeamId team, uint8_t flags,
              const Buffer* recv) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) return inside_->Reduce(send, kind, root, team, flags, recv);
    internode::Reduce(To(*layout), send, kind, root, flags, recv);
  }
  void AllToAll(const Buffer& send, const SplitCounts& parts, TeamId team, uint8_t flags,
                const Buffer& recv) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) return inside_->AllToAll(send, parts, team, flags, recv);
    internode::AllToAll(To(*layout), send, parts, flags, recv);
  }
  void Permute(const Buffer& send, const Sources& sources, TeamId team, uint8_t flags,
               const Buffer& recv) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) return inside_->Permute(send, sources, team, flags, recv);
    internode::Permute(To(*layout), send, sources, flags, recv);
  }
  void AllGather(const Buffer& send, TeamId team, uint8_t flags, const Buffer& recv) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) return inside_->AllGather(send, team, flags, recv);
    internode::AllGather(To(*layout), send, flags, recv);
  }
  void Broadcast(const Buffer* send, int root, TeamId team, uint8_t flags,
                 const Buffer& recv) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) return inside_->Broadcast(send, root, team, flags, recv);
    internode::Broadcast(To(*layout), send, root, flags, recv);
  }
  void Scatter(const Buffer* send, int root, TeamId team, uint8_t flags, const Buffer& recv) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) return inside_->Scatter(send, root, team, flags, recv);
    internode::Scatter(To(*layout), send, root, flags, recv);
  }
  void Gather(const Buffer& send, int root, TeamId team, uint8_t flags, const Buffer* recv) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) return inside_->Gather(send, root, team, flags, recv);
    internode::Gather(To(*layout), send, root, flags, recv);
  }
  void Send(const Buffer& send, int receiver) final {
    CheckPeer(rank_, "send_to_worker", receiver);
    if (rank_.control().IsHere(receiver)) return inside_->Send(send, receiver);
    internode::Send(rank_, *ring_, send, receiver);
  }
  void Receive(const Buffer& recv, int sender) final {
    CheckPeer(rank_, "recv_from_worker", sender);
    if (rank_.control().IsHere(sender)) return inside_->Receive(recv, sender);
    internode::Receive(rank_, *ring_, recv, sender);
  }

  ExposedBuffer Expose(const Buffer& tensor, TeamId team, std::shared_ptr<const void> keep) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) return inside_->Expose(tensor, team, std::move(keep));
    return exposed_buffers_->Expose(*layout, tensor, std::move(keep));
  }
  PeerMemory PeerView(ExposedBuffer& exposed, int64_t shift) final {
    const NodeLayout* layout = InternodeTeam(exposed.team);
    if (layout == nullptr) return inside_->PeerView(exposed, shift);
    return exposed_buffers_->PeerView(*layout, exposed, shift);
  }
  void Release(TeamId team, const std::vector<const ExposedBuffer*>& exposed) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) return inside_->Release(team, exposed);
    exposed_buffers_->Release(*layout, exposed);
  }
  /*! \brief All slices are in memory of this node. */
  void ReduceSlices(ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                    const Buffer& recv) final {
    inside_->ReduceSlices(kind, team, parts, recv);
  }

  void Copy(const Buffer& source, const Buffer& target) final { inside_->Copy(source, target); }
  /*! \brief Return at once: no user memory is in flight when a collective returns. */
  void Synchronise() final {}

 private:
  /*! \brief Return the layout of a team of several nodes; null if all members are on this node. */
  const NodeLayout* InternodeTeam(TeamId team) {
    if (!ring_) return nullptr;
    const NodeLayout& layout = layouts_.Of(team);
    return layout.is_internode() ? &layout : nullptr;
  }
  internode::Call To(const NodeLayout& layout) { return {rank_, *ring_, layout}; }

  Rank& rank_;
  std::unique_ptr<Endpoint> inside_;
  NodeLayouts layouts_;
  std::optional<InternodeRing> ring_;
  std::optional<InternodeExposedBuffers> exposed_buffers_;
};

/*! \brief The backend; what concerns one machine is inherited. */
class MpiBackend final : public Backend {
 public:
  const char* name() const final { return "mpi"; }
  Capabilities capabilities() const final { return SharedMemory().capabilities(); }
  std::vector<File> Prepare(const Control& control) const final {
    return SharedMemory().Prepare(control);
  }
  std::unique_ptr<Endpoint> Start(Rank& rank) const final {
    return std::make_unique<NodesEndpoint>(rank);
  }
  bool Reduces(ElementType type, ReduceKind kind) const final {
    return SharedMemory().Reduces(type, kind);
  }
  std::vector<std::string> instruction_sets() const final {
    return SharedMemory().instruction_sets();
  }
  std::string instruction_set() const final { return SharedMemory().instruction_set(); }
  bool UseInstructionSet(const std::string& name) const final {
    return SharedMemory().UseInstructionSet(name);
  }
};

}  // namespace

const Backend& Mpi() {
  static const MpiBackend backend;
  return backend;
}

}  // namespace tvm_ipc
