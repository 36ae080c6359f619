/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file exposed_buffer_peer_copies.cc
 * \brief Exposed buffers on devices. The host keeps the list of buffers and their numbers
 *        (core/exposed_buffers.h). The data is ordered by a number in each team slot, which a
 *        kernel writes after the kernels that compute the tensor.
 *
 * A buffer that a peer exposes is copied to memory of this rank, concurrently with the program. A
 * separate stream waits for the peer's number and copies; the program's stream waits for the copy.
 * The memory for the copy is allocated when this rank exposes its own tensor. So the separate
 * stream waits for what the program's stream had enqueued before the expose, and for nothing after
 * it.
 */
#include <utility>

#include "core/exposed_buffers.h"
#include "cuda/cuda_endpoint.h"

namespace tvm_ipc::cuda {

/*! \brief An exposed tensor, and the copies of the peers' tensors with the same number. */
struct Landing {
  Landing(const std::shared_ptr<Device>& device, std::shared_ptr<Heap> heap,
          std::shared_ptr<const void> keep)
      : exposed(device), heap(std::move(heap)), keep(std::move(keep)) {}
  ~Landing() {
    for (auto& [data, size] : blocks) heap->Free(data, size);
  }
  Landing(const Landing&) = delete;
  Landing& operator=(const Landing&) = delete;

  /*! \brief Recorded on the program's stream when the tensor is exposed. */
  OwnEvent exposed;
  std::shared_ptr<Heap> heap;
  /*! \brief The tensor's own memory. */
  std::shared_ptr<const void> keep;
  std::vector<std::pair<void*, size_t>> blocks;
  /*! \brief The buffers for the members' tensors, by index in the team. */
  void* memory[kernels::kMaxMembers] = {};
  /*! \brief The events after the copies into `memory`; null if a copy was not started. */
  std::unique_ptr<OwnEvent> arrived[kernels::kMaxMembers];
};

namespace {

[[noreturn]] void FailCapture(const char* operation) {
  Fail(kind::kRuntime, operation,
       ": a CUDA graph is being captured, and exposed buffers synchronize on the host, which a "
       "replay does"
       " not; keep expose, peer_view and release out of what is captured");
}

Landing& LandingOf(const ExposedBuffer& exposed) {
  return *static_cast<Landing*>(const_cast<void*>(exposed.keep.get()));
}

}  // namespace

ExposedBuffer CudaEndpoint::Expose(const Buffer& tensor, TeamId team,
                                   std::shared_ptr<const void> keep) {
  Operation operation(*this, team);
  if (operation.capturing) FailCapture("expose");
  const size_t bytes = tensor.bytes();
  // The landing frees its memory once the tensor is released and nobody holds the peers' tensors.
  // If the heap reuses that memory, it is used later on the program's stream, or by a later expose.
  auto landing = std::make_shared<Landing>(device_, regions_->heap(), std::move(keep));
  auto allocate = [&](const std::shared_ptr<Heap>& heap) {
    void* const data = heap->Allocate(bytes);
    if (heap == landing->heap) landing->blocks.emplace_back(data, bytes);
    return data;
  };
  ExposedBuffer exposed;
  exposed.team = team;
  exposed.session = rank_.segments();
  exposed.generation = operation.guard.barrier.generation();
  exposed.rank = rank_.id();
  exposed.memory = tensor;
  int64_t offset = regions_->OffsetOf(tensor.data, bytes);
  if (offset < 0) {
    const std::shared_ptr<Heap> room = regions_->room();
    std::shared_ptr<void> copy(room->Allocate(bytes),
                               [room, bytes](void* data) { room->Free(data, bytes); });
    operation.Copy(copy.get(), tensor.data, bytes);
    offset = regions_->OffsetOf(copy.get(), bytes);
    if (regions_->room() == regions_->heap()) exposed.memory.data = copy.get();
    landing->keep = std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<void>>>(
        landing->keep, copy);
  }
  for (int i = 0; i < operation.size(); ++i) {
    if (i != operation.place()) landing->memory[i] = allocate(landing->heap);
  }
  landing->exposed.Record(operation.stream);
  exposed.keep = landing;
  // Launch the kernel first, so that it is already enqueued when a peer waits for the number on its
  // device.
  auto launch = [&](uint32_t number) {
    kernels::ExposeArgs args{operation.member.args,
                             HeaderOf(kernels::kExpose, tensor.type, tensor.count), number,
                             operation.place()};
    operation.Launch("expose", kernels_->expose, kernels::LaunchMeet(operation.limits()), &args);
  };
  exposed.number = operation.guard.barrier.exposed_buffers().Expose(
      {offset, tensor.count, tensor.type, EmulatedLink::Now()}, exposed.keep, launch);
  return exposed;
}

PeerMemory CudaEndpoint::PeerView(ExposedBuffer& exposed, int64_t shift) {
  Operation operation(*this, exposed.team);
  if (operation.capturing) FailCapture("peer_view");
  TeamBarrier& barrier = operation.guard.barrier;
  RequireOpen("peer_view", rank_, barrier, exposed);
  const int place = TeamIndexAfter(barrier, shift);
  if (place == operation.place()) return {exposed.memory.data, exposed.keep};
  const ExposedMemory& theirs = barrier.exposed_buffers().Of(place, exposed.number);
  Landing& landing = LandingOf(exposed);
  std::unique_ptr<OwnEvent>& arrived = landing.arrived[place];
  if (arrived == nullptr) {
    Stream const beside = copy_stream_->get();
    landing.exposed.Await(beside);
    kernels::ExposeArgs args{operation.member.args,
                             HeaderOf(kernels::kExpose, exposed.memory.type, exposed.memory.count),
                             exposed.number, place};
    Launch("peer_view", kernels_->await, kernels::LaunchMeet(operation.limits()), beside, &args);
    const auto* const from =
        operation.member.args.region[place] + static_cast<size_t>(theirs.offset);
    CopyOnStream(landing.memory[place], from, exposed.memory.bytes(), beside);
    arrived = std::make_unique<OwnEvent>(device_);
    arrived->Record(beside);
  }
  arrived->Await(operation.stream);
  return {landing.memory[place], exposed.keep};
}

void CudaEndpoint::Release(TeamId team, const std::vector<const ExposedBuffer*>& all) {
  Operation operation(*this, team);
  if (operation.capturing) FailCapture("release");
  TeamBarrier& barrier = operation.guard.barrier;
  std::vector<uint32_t> numbers = NumbersToRelease(rank_, barrier, team, all);
  // Copies read the peers' buffers even if the program has not waited for them.
  for (const ExposedBuffer* exposed : all) {
    for (const auto& arrived : LandingOf(*exposed).arrived) {
      if (arrived != nullptr) arrived->Await(operation.stream);
    }
  }
  kernels::BarrierArgs args{operation.member.args, HeaderOf(kernels::kBarrier, {}, numbers.size())};
  barrier.exposed_buffers().Release(std::move(numbers), [&] {
    operation.LaunchMet("release", kernels_->meet, kernels::LaunchMeet(operation.limits()), &args);
  });
}

}  // namespace tvm_ipc::cuda
