/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file data_movement_collectives.cc
 * \brief Collectives that only move bytes. Each is a table of the bytes that members send and
 *        receive.
 */
#include <algorithm>
#include <vector>

#include "core/all_to_all_layout.h"
#include "core/ragged_rows.h"
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

void CudaEndpoint::Move(Operation& operation, const Call& call, kernels::Header header,
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
  operation.LaunchTogether(Name(call.collective), pulls ? kernels_->move : kernels_->move_push,
                           kernels::LaunchMove(path, plan.longest, operation.limits()), args.header,
                           &args);
}

void CudaEndpoint::AllGather(Operation& operation, const Call& call) {
  const auto n = static_cast<size_t>(operation.size());
  const size_t part = call.send.bytes();
  MovePlan plan{&call.send, call.recv.data, part, {}, {}};
  for (size_t i = 0; i < n; ++i) {
    plan.give[i] = {0, 0, part};
    plan.take[i] = {0, i * part, part};
  }
  Move(operation, call, HeaderOf(call), plan);
}

void CudaEndpoint::BroadcastInSlices(Operation& operation, const Call& call,
                                     kernels::Header header) {
  const Buffer& recv = call.recv;
  const int root = call.root;
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
  const Buffer* const send = sends ? &call.send : nullptr;
  if (sends) operation.Copy(recv.data, send->data, bytes);
  MovePlan scatter{send, mine.data, longest, {}, {}};
  if (!sends) scatter.take[root] = {begin(me), 0, size(me)};
  for (int i = 0; sends && i < n; ++i) {
    if (i != root) scatter.give[i] = {begin(i), 0, size(i)};
  }
  Move(operation, call, header, scatter);
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
  Move(operation, call, header, gather);
}

void CudaEndpoint::Broadcast(Operation& operation, const Call& call) {
  const size_t bytes = call.recv.bytes();
  const bool sends = operation.place() == call.root;
  const kernels::Header header = HeaderOf(call);
  if (kernels::BroadcastsSlices(bytes, operation.size(), apart_)) {
    return BroadcastInSlices(operation, call, header);
  }
  MovePlan plan{sends ? &call.send : nullptr, call.recv.data, bytes, {}, {}};
  plan.take[call.root] = {0, 0, bytes};
  for (int i = 0; sends && i < operation.size(); ++i) plan.give[i] = {0, 0, bytes};
  Move(operation, call, header, plan);
}

void CudaEndpoint::Scatter(Operation& operation, const Call& call) {
  const int n = operation.size();
  const auto me = static_cast<size_t>(operation.place());
  const bool sends = operation.place() == call.root;
  const size_t part = call.recv.bytes();
  MovePlan plan{sends ? &call.send : nullptr, call.recv.data, part, {}, {}};
  plan.take[call.root] = {me * part, 0, part};
  for (int i = 0; sends && i < n; ++i) plan.give[i] = {static_cast<size_t>(i) * part, 0, part};
  Move(operation, call, HeaderOf(call), plan);
}

void CudaEndpoint::Gather(Operation& operation, const Call& call) {
  const int n = operation.size();
  const size_t part = call.send.bytes();
  const bool receives = operation.place() == call.root;
  MovePlan plan{&call.send, receives ? call.recv.data : nullptr, part, {}, {}};
  plan.give[call.root] = {0, 0, part};
  for (int i = 0; receives && i < n; ++i) plan.take[i] = {0, static_cast<size_t>(i) * part, part};
  Move(operation, call, HeaderOf(call), plan);
}

void CudaEndpoint::AllToAll(Operation& operation, const Call& call) {
  const int n = operation.size();
  const int me = operation.place();
  const Division division(call.send, call.layout, n);
  MovePlan plan{&call.send, call.recv.data, division.longest(), {}, {}};
  for (int i = 0; i < n; ++i) {
    plan.give[i] = {division.before(me, i), 0, division.part(me, i)};
    plan.take[i] = {division.before(i, me), division.recv_offset(i, me), division.part(i, me)};
  }
  Move(operation, call, HeaderOf(call), plan);
}

void CudaEndpoint::RaggedAllToAll(Operation& operation, const Call& call) {
  const char* const name = Name(call.collective);
  const int n = operation.size();
  const int me = operation.place();
  if (operation.capturing) {
    Fail(kind::kRuntime, name,
         ": a CUDA graph is being captured, but the host has to read the counts; leave it out of"
         " graphs");
  }
  // The host chooses the kernel and its grid by the counts of all members, so it waits for them.
  auto read = [&](const void* data, size_t numbers) {
    std::vector<int64_t> counts(numbers);
    operation.Copy(counts.data(), data, numbers * sizeof(int64_t));
    driver_.cuStreamSynchronize(name, operation.stream);
    CheckRecord(*operation.member.record, &operation.member);
    return counts;
  };
  const size_t numbers = call.counts.count;
  CheckSentRows(call, read(call.counts.data, numbers).data(), n);
  const size_t bytes = call.counts.bytes();
  uint64_t offset = 0;
  void* const scratch = operation.Scratch(static_cast<size_t>(n) * bytes, &offset);
  MovePlan gather{&call.counts, scratch, bytes, {}, {}};
  for (int i = 0; i < n; ++i) {
    gather.give[i] = {0, 0, bytes};
    gather.take[i] = {0, static_cast<size_t>(i) * bytes, bytes};
  }
  kernels::Header header = HeaderOf(call);
  const uint32_t mode = header.mode;
  // The promise of the caller is about send.
  header.mode = kernels::Mode(kernels::KindOf(mode), mode >> 8 & 0xff, 0);
  Move(operation, call, header, gather);
  const std::vector<int64_t> all = read(scratch, static_cast<size_t>(n) * numbers);
  const std::vector<int64_t> received = ReceivedCounts(call, all, n, me);
  CheckReceivedRows(call, received.data(), me);
  const size_t part = bytes / static_cast<size_t>(n);
  for (int i = 0; i < n; ++i) {
    const size_t from = static_cast<size_t>(i) * bytes + static_cast<size_t>(me) * part;
    operation.Copy(call.recv_counts.begin() + static_cast<size_t>(i) * part,
                   static_cast<const uint8_t*>(scratch) + from, part);
  }
  const std::vector<int64_t> sizes = SplitSizes(call, all, n);
  const Division division(call.send, sizes, n);
  MovePlan plan{&call.send, call.recv.data, division.longest(), {}, {}};
  for (int i = 0; i < n; ++i) {
    plan.give[i] = {division.before(me, i), 0, division.part(me, i)};
    plan.take[i] = {division.before(i, me), division.recv_offset(i, me), division.part(i, me)};
  }
  header.mode = mode;
  ++header.parts;  // marks the second half
  Move(operation, call, header, plan);
}

void CudaEndpoint::Permute(Operation& operation, const Call& call) {
  const NumberView& sources = call.layout;
  const size_t bytes = call.send.bytes();
  MovePlan plan{&call.send, call.recv.data, bytes, {}, {}};
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i] == operation.place()) plan.give[i] = {0, 0, bytes};
  }
  const int64_t source = sources[static_cast<size_t>(operation.place())];
  if (source >= 0) {
    plan.take[source] = {0, 0, bytes};
  } else if (bytes > 0) {
    driver_.cuMemsetD8Async("permute", AddressOf(call.recv.data), 0, bytes, operation.stream);
  }
  Move(operation, call, HeaderOf(call), plan);
}

}  // namespace tvm_ipc::cuda
