/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file endpoint_and_backend.cc
 * \brief The backend for several nodes. Within a node it uses the CPU backend of one machine; teams
 *        and messages across nodes use the internode ring.
 */
#include "mpi/endpoint_and_backend.h"

#include <optional>
#include <utility>

#include "core/check_collective_arguments.h"
#include "core/internode_request_queue.h"
#include "core/point_to_point_waits_and_errors.h"
#include "core/rank_runtime_state.h"
#include "mpi/exposed_buffers_sent_to_nodes.h"
#include "mpi/internode_collectives.h"
#include "shm/endpoint_and_backend.h"

namespace tvm_ipc {

namespace {

using Kernel = void (*)(const internode::Context& context, const Call& call);

constexpr Kernel kKernels[] = {
#define TVM_IPC_KERNEL(Name, text, relation, mpi, ...) Kernel{TVM_IPC_IF_##mpi(&internode::Name)},
    TVM_IPC_COLLECTIVES(TVM_IPC_KERNEL)
#undef TVM_IPC_KERNEL
};

class NodesEndpoint final : public SharedMemoryEndpoint {
 public:
  explicit NodesEndpoint(Rank& rank) : SharedMemoryEndpoint(rank), layouts_(rank) {
    if (rank.control().ring_bytes == 0) return;
    ring_.emplace(rank);
    exposed_buffers_.emplace(rank, *ring_);
  }

  void Run(const Call& call) final {
    const NodeLayout* layout = InternodeTeam(call.team);
    if (layout == nullptr) return SharedMemoryEndpoint::Run(call);
    Check(call, layout->size(), layout->me);
    KernelOf(kKernels, call)({rank_, *ring_, *layout}, call);
    CountBytes(call, layout->size(), layout->me);
  }
  void Send(const Buffer& send, int receiver) final {
    CheckPeer(rank_, "send_to_worker", receiver);
    if (rank_.control().IsHere(receiver)) return SharedMemoryEndpoint::Send(send, receiver);
    internode::Send(rank_, *ring_, send, receiver);
  }
  void Receive(const Buffer& recv, int sender) final {
    CheckPeer(rank_, "recv_from_worker", sender);
    if (rank_.control().IsHere(sender)) return SharedMemoryEndpoint::Receive(recv, sender);
    internode::Receive(rank_, *ring_, recv, sender);
  }

  ExposedBuffer Expose(const Buffer& tensor, TeamId team, std::shared_ptr<const void> keep) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) return SharedMemoryEndpoint::Expose(tensor, team, std::move(keep));
    return exposed_buffers_->Expose(*layout, tensor, std::move(keep));
  }
  PeerMemory PeerView(ExposedBuffer& exposed, int64_t shift) final {
    const NodeLayout* layout = InternodeTeam(exposed.team);
    if (layout == nullptr) return SharedMemoryEndpoint::PeerView(exposed, shift);
    return exposed_buffers_->PeerView(*layout, exposed, shift);
  }
  void Release(TeamId team, const std::vector<const ExposedBuffer*>& exposed) final {
    const NodeLayout* layout = InternodeTeam(team);
    if (layout == nullptr) return SharedMemoryEndpoint::Release(team, exposed);
    exposed_buffers_->Release(*layout, exposed);
  }

 private:
  /*! \brief Return the layout of a team of several nodes; null if all members are on this node. */
  const NodeLayout* InternodeTeam(TeamId team) {
    if (!ring_) return nullptr;
    const NodeLayout& layout = layouts_.Of(team);
    return layout.is_internode() ? &layout : nullptr;
  }

  NodeLayouts layouts_;
  std::optional<InternodeRing> ring_;
  std::optional<InternodeExposedBuffers> exposed_buffers_;
};

/*! \brief The backend; what concerns one machine is inherited. */
class MpiBackend final : public SharedMemoryBackend {
 public:
  const char* name() const final { return "mpi"; }
  std::unique_ptr<Endpoint> Start(Rank& rank) const final {
    return std::make_unique<NodesEndpoint>(rank);
  }
};

}  // namespace

const Backend& Mpi() {
  static const MpiBackend backend;
  return backend;
}

}  // namespace tvm_ipc
