/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file backend.cc
 * \brief Inside of a node everything is the backend shm's; teams and messages across nodes go
 *        through the wire.
 */
#include "mpi/backend.h"

#include <optional>
#include <utility>

#include "core/group.h"
#include "core/messages.h"
#include "core/wire.h"
#include "mpi/collectives.h"
#include "mpi/shows.h"
#include "shm/backend.h"

namespace tvm_ipc {

namespace {

class NodesEndpoint final : public Endpoint {
 public:
  explicit NodesEndpoint(Rank& rank)
      : rank_(rank), inside_(SharedMemory().Start(rank)), layouts_(rank) {
    if (rank.control().wire_bytes == 0) return;
    wire_.emplace(rank);
    shows_.emplace(rank, *wire_);
  }

  const std::shared_ptr<Heap>& heap() const final { return inside_->heap(); }

  void AllReduce(const Buffer& send, ReduceKind kind, TeamId team, Strategy strategy, uint8_t flags,
                 const Buffer& recv) final {
    const Layout* layout = Across(team);
    if (layout == nullptr) return inside_->AllReduce(send, kind, team, strategy, flags, recv);
    across::AllReduce(To(*layout), send, kind, strategy, flags, recv);
  }
  void AllReduceNorm(const Buffer& send, const Buffer& residual, const Norm& norm, TeamId team,
                     Strategy strategy, uint8_t flags, const Buffer& residual_out,
                     const Buffer& norm_out) final {
    const Layout* layout = Across(team);
    if (layout == nullptr) {
      return inside_->AllReduceNorm(send, residual, norm, team, strategy, flags, residual_out,
                                    norm_out);
    }
    across::AllReduceNorm(To(*layout), send, residual, norm, strategy, flags, residual_out,
                          norm_out);
  }
  void ReduceScatter(const Buffer& send, ReduceKind kind, TeamId team, uint8_t flags,
                     const Buffer& recv) final {
    const Layout* layout = Across(team);
    if (layout == nullptr) return inside_->ReduceScatter(send, kind, team, flags, recv);
    across::ReduceScatter(To(*layout), send, kind, flags, recv);
  }
  void Reduce(const Buffer& send, ReduceKind kind, int root, TeamId team, uint8_t flags,
              const Buffer* recv) final {
    const Layout* layout = Across(team);
    if (layout == nullptr) return inside_->Reduce(send, kind, root, team, flags, recv);
    across::Reduce(To(*layout), send, kind, root, flags, recv);
  }
  void AllToAll(const Buffer& send, const Parts& parts, TeamId team, uint8_t flags,
                const Buffer& recv) final {
    const Layout* layout = Across(team);
    if (layout == nullptr) return inside_->AllToAll(send, parts, team, flags, recv);
    across::AllToAll(To(*layout), send, parts, flags, recv);
  }
  void Permute(const Buffer& send, const Sources& sources, TeamId team, uint8_t flags,
               const Buffer& recv) final {
    const Layout* layout = Across(team);
    if (layout == nullptr) return inside_->Permute(send, sources, team, flags, recv);
    across::Permute(To(*layout), send, sources, flags, recv);
  }
  void AllGather(const Buffer& send, TeamId team, uint8_t flags, const Buffer& recv) final {
    const Layout* layout = Across(team);
    if (layout == nullptr) return inside_->AllGather(send, team, flags, recv);
    across::AllGather(To(*layout), send, flags, recv);
  }
  void Broadcast(const Buffer* send, int root, TeamId team, uint8_t flags,
                 const Buffer& recv) final {
    const Layout* layout = Across(team);
    if (layout == nullptr) return inside_->Broadcast(send, root, team, flags, recv);
    across::Broadcast(To(*layout), send, root, flags, recv);
  }
  void Scatter(const Buffer* send, int root, TeamId team, uint8_t flags, const Buffer& recv) final {
    const Layout* layout = Across(team);
    if (layout == nullptr) return inside_->Scatter(send, root, team, flags, recv);
    across::Scatter(To(*layout), send, root, flags, recv);
  }
  void Gather(const Buffer& send, int root, TeamId team, uint8_t flags, const Buffer* recv) final {
    const Layout* layout = Across(team);
    if (layout == nullptr) return inside_->Gather(send, root, team, flags, recv);
    across::Gather(To(*layout), send, root, flags, recv);
  }
  void Send(const Buffer& send, int receiver) final {
    CheckPeer(rank_, "send_to_worker", receiver);
    if (rank_.control().IsHere(receiver)) return inside_->Send(send, receiver);
    across::Send(rank_, *wire_, send, receiver);
  }
  void Receive(const Buffer& recv, int sender) final {
    CheckPeer(rank_, "recv_from_worker", sender);
    if (rank_.control().IsHere(sender)) return inside_->Receive(recv, sender);
    across::Receive(rank_, *wire_, recv, sender);
  }

  Shown Show(const Buffer& tensor, TeamId team, std::shared_ptr<const void> keep) final {
    const Layout* layout = Across(team);
    if (layout == nullptr) return inside_->Show(tensor, team, std::move(keep));
    return shows_->Show(*layout, tensor, std::move(keep));
  }
  PeerMemory Peer(Shown& shown, int64_t shift) final {
    const Layout* layout = Across(shown.team);
    if (layout == nullptr) return inside_->Peer(shown, shift);
    return shows_->Peer(*layout, shown, shift);
  }
  void Hide(TeamId team, const std::vector<const Shown*>& shown) final {
    const Layout* layout = Across(team);
    if (layout == nullptr) return inside_->Hide(team, shown);
    shows_->Hide(*layout, shown);
  }
  /*! \brief All parts are in memory of this node. */
  void ReduceParts(ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                   const Buffer& recv) final {
    inside_->ReduceParts(kind, team, parts, recv);
  }

  void Copy(const Buffer& source, const Buffer& target) final { inside_->Copy(source, target); }
  /*! \brief Nothing of users' is in flight when a collective returns. */
  void Synchronise() final {}

 private:
  /*! \brief Where the members are, if they are on several nodes; else null. */
  const Layout* Across(TeamId team) {
    if (!wire_) return nullptr;
    const Layout& layout = layouts_.Of(team);
    return layout.across() ? &layout : nullptr;
  }
  across::Call To(const Layout& layout) { return {rank_, *wire_, layout}; }

  Rank& rank_;
  std::unique_ptr<Endpoint> inside_;
  Layouts layouts_;
  std::optional<RankWire> wire_;
  std::optional<ShowsAcross> shows_;
};

/*! \brief What is of one machine is as of shm. */
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
