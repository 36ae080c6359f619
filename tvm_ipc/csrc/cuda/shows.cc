/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file shows.cc
 * \brief Shows between devices: boards and numbers are the host's (core/shows.h), and the order of
 *        data is a number in each seat, which a kernel writes after what made the tensor.
 *
 * What a peer shows is copied to memory of this rank, beside the program: a stream of its own waits
 * for the peer's number, and copies; the program's stream waits for the copy. The memory for it is
 * there since the tensor was shown, and was free then: so that stream waits for what the program's
 * stream did before the show, and for nothing after it.
 */
#include "core/shows.h"

#include <utility>

#include "cuda/endpoint.h"

namespace tvm_ipc::cuda {

/*! \brief A tensor that is shown, and those of peers with its number. */
struct Landing {
  Landing(const std::shared_ptr<Device>& device, std::shared_ptr<Heap> heap,
          std::shared_ptr<const void> keep)
      : shown(device), heap(std::move(heap)), keep(std::move(keep)) {}
  ~Landing() {
    for (auto& [data, size] : blocks) heap->Free(data, size);
  }
  Landing(const Landing&) = delete;
  Landing& operator=(const Landing&) = delete;

  /*! \brief After what the program had started when it showed the tensor. */
  OwnEvent shown;
  std::shared_ptr<Heap> heap;
  /*! \brief The tensor's own memory. */
  std::shared_ptr<const void> keep;
  std::vector<std::pair<void*, size_t>> blocks;
  /*! \brief By place: where the member's tensor comes to lie, and when it is there. */
  void* memory[kernels::kMaxMembers] = {};
  std::unique_ptr<OwnEvent> arrived[kernels::kMaxMembers];
};

namespace {

[[noreturn]] void FailCapture(const char* operation) {
  Fail(kind::kRuntime, operation,
       ": a CUDA graph is being captured, and what is shown meets on the host, which a replay does"
       " not; keep show, peer and hide out of what is captured");
}

Landing& LandingOf(const Shown& shown) {
  return *static_cast<Landing*>(const_cast<void*>(shown.keep.get()));
}

}  // namespace

Shown CudaEndpoint::Show(const Buffer& tensor, TeamId team, std::shared_ptr<const void> keep) {
  Operation operation(*this, team);
  if (operation.capturing) FailCapture("show");
  const size_t bytes = tensor.bytes();
  // It frees its memory when the tensor is hidden and nobody holds what was peers': what the heap
  // gives out next is used after that on the program's stream, or by the next show.
  auto landing = std::make_shared<Landing>(device_, regions_->heap(), std::move(keep));
  auto allocate = [&](const std::shared_ptr<Heap>& heap) {
    void* const data = heap->Allocate(bytes);
    if (heap == landing->heap) landing->blocks.emplace_back(data, bytes);
    return data;
  };
  Shown shown;
  shown.team = team;
  shown.session = rank_.segments();
  shown.generation = operation.turn.meeting.generation();
  shown.rank = rank_.id();
  shown.memory = tensor;
  int64_t offset = regions_->OffsetOf(tensor.data, bytes);
  if (offset < 0) {
    const std::shared_ptr<Heap> room = regions_->room();
    std::shared_ptr<void> copy(room->Allocate(bytes),
                               [room, bytes](void* data) { room->Free(data, bytes); });
    operation.Copy(copy.get(), tensor.data, bytes);
    offset = regions_->OffsetOf(copy.get(), bytes);
    if (regions_->room() == regions_->heap()) shown.memory.data = copy.get();
    landing->keep = std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<void>>>(
        landing->keep, copy);
  }
  for (int i = 0; i < operation.size(); ++i) {
    if (i != operation.place()) landing->memory[i] = allocate(landing->heap);
  }
  landing->shown.Record(operation.stream);
  shown.keep = landing;
  // The kernel first: who waits for the number on its device finds it on the way.
  auto launch = [&](uint32_t number) {
    kernels::ShowArgs args{operation.member.args,
                           HeaderOf(kernels::kShow, tensor.type, tensor.count, 0), number,
                           operation.place()};
    operation.Launch("show", kernels_->show, kernels::LaunchMeet(operation.limits()), &args);
  };
  shown.number = operation.turn.meeting.shows().Show(
      {offset, tensor.count, tensor.type, EmulatedLink::Now()}, shown.keep, launch);
  return shown;
}

PeerMemory CudaEndpoint::Peer(Shown& shown, int64_t shift) {
  Operation operation(*this, shown.team);
  if (operation.capturing) FailCapture("peer");
  Meeting& meeting = operation.turn.meeting;
  RequireOpen("peer", rank_, meeting, shown);
  const int place = PlaceAfter(meeting, shift);
  if (place == operation.place()) return {shown.memory.data, shown.keep};
  const ShownMemory& theirs = meeting.shows().Of(place, shown.number);
  Landing& landing = LandingOf(shown);
  std::unique_ptr<OwnEvent>& arrived = landing.arrived[place];
  if (arrived == nullptr) {
    Stream const beside = copy_stream_->get();
    landing.shown.Await(beside);
    kernels::ShowArgs args{operation.member.args,
                           HeaderOf(kernels::kShow, shown.memory.type, shown.memory.count, 0),
                           shown.number, place};
    Launch("peer", kernels_->await, kernels::LaunchMeet(operation.limits()), beside, &args);
    const auto* const from =
        operation.member.args.region[place] + static_cast<size_t>(theirs.offset);
    CopyOnStream(landing.memory[place], from, shown.memory.bytes(), beside);
    arrived = std::make_unique<OwnEvent>(device_);
    arrived->Record(beside);
  }
  arrived->Await(operation.stream);
  return {landing.memory[place], shown.keep};
}

void CudaEndpoint::Hide(TeamId team, const std::vector<const Shown*>& all) {
  Operation operation(*this, team);
  if (operation.capturing) FailCapture("hide");
  Meeting& meeting = operation.turn.meeting;
  std::vector<uint32_t> numbers = NumbersToHide(rank_, meeting, team, all);
  // Copies that nobody waits for read what peers show, all the same.
  for (const Shown* shown : all) {
    for (const auto& arrived : LandingOf(*shown).arrived) {
      if (arrived != nullptr) arrived->Await(operation.stream);
    }
  }
  kernels::MeetArgs args{operation.member.args, HeaderOf(kernels::kMeet, {}, numbers.size(), 0)};
  meeting.shows().Hide(std::move(numbers), [&] {
    operation.LaunchMet("hide", kernels_->meet, kernels::LaunchMeet(operation.limits()), &args);
  });
}

}  // namespace tvm_ipc::cuda
