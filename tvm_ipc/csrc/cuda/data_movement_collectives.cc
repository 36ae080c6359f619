/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file data_movement_collectives.cc
 * \brief Collectives that only move bytes. Each is a table of the bytes that members send and
 *        receive.
 */
#include <algorithm>

#include "cuda/buffer_size_and_overlap_checks.h"
#include "cuda/cuda_endpoint.h"

namespace tvm_ipc::cuda {

/*! \brief The bytes that a member sends to and receives from each member, with their offsets. */
struct MovePlan {
  const Buffer* send = nullptr;
  void* recv = nullptr;
  /*! \brief The size of the largest piece that any member sends to another; the same on all
   *         members. */
  size_t longest = 0;
  struct Piece {
    uint64_t from = 0;
    uint64_t to = 0;
    uint64_t bytes = 0;
  };
  Piece give[kernels::kMaxMembers];
  Piece take[kernels::kMaxMembers];
};

void CudaEndpoint::Move(Operation& operation, const char* what, kernels::Header header,
                        const MovePlan& plan) {
  const int n = operation.size();
  const int me = operation.place();
  const uint8_t* const send = plan.send == nullptr ? nullptr : plan.send->begin();
  auto* const recv = static_cast<uint8_t*>(plan.recv);
  // A member copies its own piece itself. It can do so first: the copy writes nothing others read.
  const MovePlan::Piece& own = plan.take[me];
  if (own.bytes > 0) operation.Copy(recv + own.to, send + own.from, own.bytes);
  if (n == 1) return;
  const kernels::Path path = kernels::ChooseMove(plan.longest, n);
  kernels::MoveArgs args{};
  args.team = operation.member.args;
  args.header = header;
  args.header.path = static_cast<uint32_t>(path);
  args.send = send;
  args.recv = recv;
  size_t given = 0;
  for (int i = 0; i < n; ++i) {
    if (i == me) continue;
    args.give_from[i] = plan.give[i].from;
    args.give_bytes[i] = plan.give[i].bytes;
    args.take_from[i] = plan.take[i].from;
    args.take_to[i] = plan.take[i].to;
    args.take_bytes[i] = plan.take[i].bytes;
    given += plan.give[i].bytes;
  }
  const bool pulls = path == kernels::Path::kPull;
  if (pulls) {
    const auto flags = static_cast<uint8_t>(kernels::FlagsOf(header.mode));
    const Operation::Input input =
        operation.PrepareInput(send, given == 0 ? 0 : plan.send->bytes(), flags);
    args.header.input = input.offset;
    args.leaves_early = static_cast<uint32_t>(input.stays);
  }
  operation.LaunchTogether(what, pulls ? kernels_->move : kernels_->move_push,
                           kernels::LaunchMove(path, plan.longest, operation.limits()), args.header,
                           &args);
}

void CudaEndpoint::AllGather(const Buffer& send, TeamId team, uint8_t flags, const Buffer& recv) {
  RequireType("allgather", send, recv);
  Operation operation(*this, team);
  const auto n = static_cast<size_t>(operation.size());
  const size_t part = send.bytes();
  if (recv.count != send.count * n) {
    Fail(kind::kValue, "allgather: recv has ", recv.count, " elements, needed are ", n, " x ",
         send.count);
  }
  const auto me = static_cast<size_t>(operation.place());
  RequireInPlaceOrApart("allgather", send, recv, recv.begin() + me * part);
  MovePlan plan{&send, recv.data, part, {}, {}};
  for (size_t i = 0; i < n; ++i) {
    plan.give[i] = {0, 0, part};
    plan.take[i] = {0, i * part, part};
  }
  Move(operation, "allgather", HeaderOf(kernels::kAllGather, send.type, send.count, flags), plan);
}

void CudaEndpoint::BroadcastInSlices(Operation& operation, kernels::Header header,
                                     const Buffer* send, int root, const Buffer& recv) {
  const int n = operation.size();
  const int me = operation.place();
  const size_t bytes = recv.bytes();
  const size_t slice = (bytes / static_cast<size_t>(n) + 15) / 16 * 16;
  auto begin = [&](int place) { return std::min(static_cast<size_t>(place) * slice, bytes); };
  auto size = [&](int place) { return (place == n - 1 ? bytes : begin(place + 1)) - begin(place); };
  const size_t longest = std::max(slice, size(n - 1));
  uint64_t offset = 0;
  Buffer mine{operation.Scratch(longest, &offset), size(me), {}};
  mine.type = {1, 8, 1};  // bytes
  const bool sends = me == root;
  if (sends) operation.Copy(recv.data, send->data, bytes);
  MovePlan scatter{send, mine.data, longest, {}, {}};
  if (!sends) scatter.take[root] = {begin(me), 0, size(me)};
  for (int i = 0; sends && i < n; ++i) {
    if (i != root) scatter.give[i] = {begin(i), 0, size(i)};
  }
  Move(operation, "broadcast", header, scatter);
  MovePlan gather{sends ? send : &mine, recv.data, longest, {}, {}};
  for (int i = 0; i < n; ++i) {
    const size_t from = i == root ? begin(i) : 0;
    if (!sends) gather.take[i] = {from, begin(i), size(i)};
    // The root already has all slices.
    if (i != me && i != root) gather.give[i] = {sends ? begin(me) : 0, 0, size(me)};
  }
  // Peers read the slices in place, so the members synchronize once more before they are
  // overwritten.
  header.mode = kernels::Mode(0, 0, 0);
  header.parts = 1;  // marks the second half
  Move(operation, "broadcast", header, gather);
}

void CudaEndpoint::Broadcast(const Buffer* send, int root, TeamId team, uint8_t flags,
                             const Buffer& recv) {
  Operation operation(*this, team);
  operation.RequireRoot("broadcast", root);
  const bool sends = operation.place() == root;
  if (sends) {
    if (send == nullptr) Fail(kind::kValue, "broadcast: the root has nothing to send");
    RequireType("broadcast", *send, recv);
    if (send->count != recv.count) {
      Fail(kind::kValue, "broadcast: send has ", send->count, " elements, recv has ", recv.count);
    }
    RequireInPlaceOrApart("broadcast", *send, recv, send->begin());
  }
  kernels::Header header = HeaderOf(kernels::kBroadcast, recv.type, recv.count, flags);
  header.root = root;
  if (kernels::BroadcastsSlices(recv.bytes(), operation.size(), apart_)) {
    return BroadcastInSlices(operation, header, sends ? send : nullptr, root, recv);
  }
  MovePlan plan{sends ? send : nullptr, recv.data, recv.bytes(), {}, {}};
  plan.take[root] = {0, 0, recv.bytes()};
  for (int i = 0; sends && i < operation.size(); ++i) plan.give[i] = {0, 0, recv.bytes()};
  Move(operation, "broadcast", header, plan);
}

void CudaEndpoint::Scatter(const Buffer* send, int root, TeamId team, uint8_t flags,
                           const Buffer& recv) {
  Operation operation(*this, team);
  operation.RequireRoot("scatter", root);
  const int n = operation.size();
  const auto me = static_cast<size_t>(operation.place());
  const bool sends = operation.place() == root;
  if (sends) {
    if (send == nullptr) Fail(kind::kValue, "scatter: the root has nothing to send");
    RequireType("scatter", *send, recv);
    if (send->count % static_cast<size_t>(n) != 0) {
      Fail(kind::kValue, "scatter: ", send->count, " elements cannot be divided evenly among ", n,
           " workers");
    }
    if (send->count / static_cast<size_t>(n) != recv.count) {
      Fail(kind::kValue, "scatter: a part of send has ", send->count / static_cast<size_t>(n),
           " elements, recv has ", recv.count);
    }
    RequireInPlaceOrApart("scatter", *send, recv, send->begin() + me * recv.bytes());
  }
  const size_t part = recv.bytes();
  MovePlan plan{sends ? send : nullptr, recv.data, part, {}, {}};
  plan.take[root] = {me * part, 0, part};
  for (int i = 0; sends && i < n; ++i) plan.give[i] = {static_cast<size_t>(i) * part, 0, part};
  kernels::Header header = HeaderOf(kernels::kScatter, recv.type, recv.count, flags);
  header.root = root;
  Move(operation, "scatter", header, plan);
}

void CudaEndpoint::Gather(const Buffer& send, int root, TeamId team, uint8_t flags,
                          const Buffer* recv) {
  Operation operation(*this, team);
  operation.RequireRoot("gather", root);
  const int n = operation.size();
  const size_t part = send.bytes();
  const bool receives = operation.place() == root;
  if (receives) {
    if (recv == nullptr) Fail(kind::kValue, "gather: the root has nowhere to receive");
    RequireType("gather", send, *recv);
    if (recv->count != send.count * static_cast<size_t>(n)) {
      Fail(kind::kValue, "gather: recv has ", recv->count, " elements, needed are ", n, " x ",
           send.count);
    }
    RequireInPlaceOrApart("gather", send, *recv, recv->begin() + static_cast<size_t>(root) * part);
  }
  MovePlan plan{&send, receives ? recv->data : nullptr, part, {}, {}};
  plan.give[root] = {0, 0, part};
  for (int i = 0; receives && i < n; ++i) plan.take[i] = {0, static_cast<size_t>(i) * part, part};
  kernels::Header header = HeaderOf(kernels::kGather, send.type, send.count, flags);
  header.root = root;
  Move(operation, "gather", header, plan);
}

void CudaEndpoint::AllToAll(const Buffer& send, const SplitCounts& parts, TeamId team,
                            uint8_t flags, const Buffer& recv) {
  Operation operation(*this, team);
  const auto n = static_cast<size_t>(operation.size());
  const auto me = static_cast<size_t>(operation.place());
  RequireParts(send, parts, n, me, recv);
  RequireApart("all_to_all", send, recv);
  const size_t width = send.type.bytes();
  auto part = [&](size_t from, size_t to) {
    return parts.empty() ? send.bytes() / n : static_cast<size_t>(parts[from * n + to]) * width;
  };
  MovePlan plan{&send, recv.data, 0, {}, {}};
  uint64_t elements = 0;
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) {
      if (i != j) plan.longest = std::max(plan.longest, part(i, j));
      if (!parts.empty()) elements += static_cast<uint64_t>(parts[i * n + j]);
    }
  }
  size_t given = 0;
  size_t taken = 0;
  for (size_t i = 0; i < n; ++i) {
    plan.give[i] = {given, 0, part(me, i)};
    given += part(me, i);
    size_t before = 0;
    for (size_t j = 0; j < me; ++j) before += part(i, j);
    plan.take[i] = {before, taken, part(i, me)};
    taken += part(i, me);
  }
  kernels::Header header =
      HeaderOf(kernels::kAllToAll, send.type, parts.empty() ? send.count : elements, flags);
  header.parts = HashOf(parts);
  Move(operation, "all_to_all", header, plan);
}

void CudaEndpoint::Permute(const Buffer& send, const Sources& sources, TeamId team, uint8_t flags,
                           const Buffer& recv) {
  Operation operation(*this, team);
  RequireEqual("permute", send, recv);
  RequireSources(sources, operation.size());
  RequireApart("permute", send, recv);
  const size_t bytes = send.bytes();
  MovePlan plan{&send, recv.data, bytes, {}, {}};
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i] == operation.place()) plan.give[i] = {0, 0, bytes};
  }
  const int64_t source = sources[static_cast<size_t>(operation.place())];
  if (source >= 0) {
    plan.take[source] = {0, 0, bytes};
  } else if (bytes > 0) {
    driver_.cuMemsetD8Async("permute", AddressOf(recv.data), 0, bytes, operation.stream);
  }
  kernels::Header header = HeaderOf(kernels::kPermute, send.type, send.count, flags);
  header.parts = HashOf(sources);
  Move(operation, "permute", header, plan);
}

}  // namespace tvm_ipc::cuda
