/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file data_movement_collectives.cc
 * \brief Collectives that only move data: NCCL's own, or sends and receives in one group.
 *
 * They move bytes, so they support every type. A member copies its own part itself.
 */
#include <algorithm>

#include "core/collective_step_barrier.h"
#include "nccl/collectives_endpoint.h"
#include "nccl/team_operation.h"

namespace tvm_ipc::nccl {

namespace {

/*! \brief More elements than any tensor has, and few enough that their sum over all workers does
 *         not overflow. */
constexpr int64_t kMostElements = int64_t{1} << 48;

Descriptor About(const OpName& op, ElementType type, size_t count, uint8_t flags, int root = -1) {
  Descriptor descriptor;
  descriptor.op = op;
  descriptor.flags = flags;
  descriptor.type = type;
  descriptor.count = count;
  descriptor.root = root;
  return descriptor;
}

void RequireType(const char* op, const Buffer& send, const Buffer& recv) {
  if (send.type == recv.type) return;
  Fail(kind::kValue, op, ": send is ", Name(send.type), ", recv is ", Name(recv.type));
}

void RequireCount(const char* op, const char* what, size_t has, size_t needed) {
  if (has == needed) return;
  Fail(kind::kValue, op, ": ", what, " has ", has, " elements, needed are ", needed);
}

/*! \brief Throw if the buffers overlap, unless the data stays in place. */
void RequireApart(const char* op, const Buffer& send, const Buffer& recv, bool in_place = false) {
  if (in_place || !send.Overlaps(recv)) return;
  Fail(kind::kValue, op, ": send and recv overlap, but not at the position where the data stays");
}

/*! \brief NCCL calls in a group; after the first failure, further calls are skipped. */
class Group {
 public:
  Group(Handle handle, cuda::Stream stream) : handle_(handle), stream_(stream) {}

  void Send(const uint8_t* from, size_t bytes, int to) {
    const auto& send = TheLibrary().Send;
    if (Goes(bytes)) Take(send.name(), send(from, bytes, kUint8, to, handle_, stream_));
  }
  void Receive(uint8_t* to, size_t bytes, int from) {
    const auto& receive = TheLibrary().Recv;
    if (Goes(bytes)) Take(receive.name(), receive(to, bytes, kUint8, from, handle_, stream_));
  }
  Called called() const { return called_; }

 private:
  bool Goes(size_t bytes) const { return bytes > 0 && called_.result == kSuccess; }
  void Take(const char* name, Result result) {
    called_ = {name, result == kInProgress ? kSuccess : result};
  }

  Handle handle_;
  cuda::Stream stream_;
  Called called_;
};

/*! \brief The sizes of the parts that members exchange in an all-to-all, known to all of them. */
class Division {
 public:
  Division(const Buffer& send, const SplitCounts& parts, int size)
      : parts_(parts),
        size_(static_cast<size_t>(size)),
        width_(send.type.bytes()),
        equal_(send.bytes() / size_) {}

  size_t part(int from, int to) const {
    return parts_.empty() ? equal_ : static_cast<size_t>(parts_[from * size_ + to]) * width_;
  }
  /*! \brief Return the offset, in the input of `from`, of its part for `to`. */
  size_t sent(int from, int to) const {
    size_t bytes = 0;
    for (int j = 0; j < to; ++j) bytes += part(from, j);
    return bytes;
  }
  /*! \brief Return the offset, in the output of `to`, of the part of `from`. */
  size_t received(int from, int to) const {
    size_t bytes = 0;
    for (int i = 0; i < from; ++i) bytes += part(i, to);
    return bytes;
  }
  /*! \brief Return the size of all parts together. */
  size_t all() const {
    if (parts_.empty()) return equal_ * size_ * size_;
    size_t bytes = 0;
    for (int64_t part : parts_) bytes += static_cast<size_t>(part) * width_;
    return bytes;
  }

 private:
  const SplitCounts& parts_;
  size_t size_;
  size_t width_;
  size_t equal_;
};

void CheckAllToAll(const Buffer& send, const SplitCounts& parts, size_t n, size_t me,
                   const Buffer& recv) {
  if (send.type != recv.type || (parts.empty() && send.count != recv.count)) {
    Fail(kind::kValue, "all_to_all: send has ", send.count, " x ", Name(send.type), ", recv has ",
         recv.count, " x ", Name(recv.type), "; they must be equal");
  }
  RequireApart("all_to_all", send, recv);
  if (parts.empty()) {
    if (send.count % n == 0) return;
    Fail(kind::kValue, "all_to_all: ", send.count, " elements cannot be divided evenly among ", n,
         " workers");
  }
  if (parts.size() != n * n) {
    Fail(kind::kValue, "all_to_all: there are ", parts.size(), " parts; ", n, " workers have ",
         n * n, ", one for each to each, or none where all are equal");
  }
  size_t given = 0;
  size_t taken = 0;
  for (size_t i = 0; i < n * n; ++i) {
    if (parts[i] < 0 || parts[i] > kMostElements) {
      Fail(kind::kValue, "all_to_all: the part of worker ", i / n, " for worker ", i % n, " has ",
           parts[i], " elements");
    }
    if (i / n == me) given += static_cast<size_t>(parts[i]);
    if (i % n == me) taken += static_cast<size_t>(parts[i]);
  }
  if (send.count == given && recv.count == taken) return;
  Fail(kind::kValue, "all_to_all: send has ", send.count, " elements and recv ", recv.count,
       "; by the parts worker ", me, " gives ", given, " and takes ", taken);
}

}  // namespace

void NcclEndpoint::AllGather(const Buffer& send, TeamId team_id, uint8_t flags,
                             const Buffer& recv) {
  RequireType("allgather", send, recv);
  Team team(communicators_, team_id);
  RequireCount("allgather", "recv", recv.count, send.count * static_cast<size_t>(team.size()));
  uint8_t* own = recv.begin() + static_cast<size_t>(team.index()) * send.bytes();
  RequireApart("allgather", send, recv, send.begin() == own);
  team.Run(About("allgather", send.type, send.count, flags), send.bytes(),
           [&](Handle handle, cuda::Stream stream) {
             const auto& gather = TheLibrary().AllGather;
             return Called{gather.name(),
                           gather(send.data, recv.data, send.bytes(), kUint8, handle, stream)};
           });
  if (team.size() == 1) team.Copy(send.begin(), recv.begin(), send.bytes());
}

void NcclEndpoint::Broadcast(const Buffer* send, int root, TeamId team_id, uint8_t flags,
                             const Buffer& recv) {
  Team team(communicators_, team_id);
  team.RequireRoot("broadcast", root);
  const bool sends = team.index() == root;
  if (sends) {
    if (send == nullptr) Fail(kind::kValue, "broadcast: the root has nothing to send");
    RequireType("broadcast", *send, recv);
    RequireCount("broadcast", "recv", recv.count, send->count);
    RequireApart("broadcast", *send, recv, send->begin() == recv.begin());
  }
  const void* source = sends ? send->data : recv.data;
  team.Run(About("broadcast", recv.type, recv.count, flags, team.rank(root)), recv.bytes(),
           [&](Handle handle, cuda::Stream stream) {
             const auto& broadcast = TheLibrary().Broadcast;
             return Called{broadcast.name(), broadcast(source, recv.data, recv.bytes(), kUint8,
                                                       root, handle, stream)};
           });
  if (team.size() == 1) team.Copy(send->begin(), recv.begin(), recv.bytes());
}

void NcclEndpoint::Scatter(const Buffer* send, int root, TeamId team_id, uint8_t flags,
                           const Buffer& recv) {
  Team team(communicators_, team_id);
  team.RequireRoot("scatter", root);
  const bool sends = team.index() == root;
  const size_t part = recv.bytes();
  const size_t n = static_cast<size_t>(team.size());
  const uint8_t* own = nullptr;
  if (sends) {
    if (send == nullptr) Fail(kind::kValue, "scatter: the root has nothing to send");
    RequireType("scatter", *send, recv);
    if (send->count % n != 0) {
      Fail(kind::kValue, "scatter: ", send->count, " elements cannot be divided evenly among ", n,
           " workers");
    }
    if (send->count / n != recv.count) {
      Fail(kind::kValue, "scatter: a part of send has ", send->count / n, " elements, recv has ",
           recv.count);
    }
    own = send->begin() + static_cast<size_t>(root) * part;
    RequireApart("scatter", *send, recv, recv.begin() == own);
  }
  team.Run(About("scatter", recv.type, recv.count, flags, team.rank(root)), part,
           [&](Handle handle, cuda::Stream stream) {
             Group group(handle, stream);
             for (int i = 0; sends && i < team.size(); ++i) {
               if (i != root) group.Send(send->begin() + static_cast<size_t>(i) * part, part, i);
             }
             if (!sends) group.Receive(recv.begin(), part, root);
             return group.called();
           });
  if (sends) team.Copy(own, recv.begin(), part);
}

void NcclEndpoint::Gather(const Buffer& send, int root, TeamId team_id, uint8_t flags,
                          const Buffer* recv) {
  Team team(communicators_, team_id);
  team.RequireRoot("gather", root);
  const bool receives = team.index() == root;
  const size_t part = send.bytes();
  uint8_t* own = nullptr;
  if (receives) {
    if (recv == nullptr) Fail(kind::kValue, "gather: the root has nowhere to receive");
    RequireType("gather", send, *recv);
    RequireCount("gather", "recv", recv->count, send.count * static_cast<size_t>(team.size()));
    own = recv->begin() + static_cast<size_t>(root) * part;
    RequireApart("gather", send, *recv, send.begin() == own);
  }
  team.Run(About("gather", send.type, send.count, flags, team.rank(root)), part,
           [&](Handle handle, cuda::Stream stream) {
             Group group(handle, stream);
             for (int i = 0; receives && i < team.size(); ++i) {
               if (i == root) continue;
               group.Receive(recv->begin() + static_cast<size_t>(i) * part, part, i);
             }
             if (!receives) group.Send(send.begin(), part, root);
             return group.called();
           });
  if (receives) team.Copy(send.begin(), own, part);
}

void NcclEndpoint::AllToAll(const Buffer& send, const SplitCounts& parts, TeamId team_id,
                            uint8_t flags, const Buffer& recv) {
  Team team(communicators_, team_id);
  const int n = team.size();
  const int me = team.index();
  CheckAllToAll(send, parts, static_cast<size_t>(n), static_cast<size_t>(me), recv);
  const Division division(send, parts, n);
  Descriptor mine = About("all_to_all", send.type, send.count, flags);
  mine.layout_hash = HashOf(parts);
  // The members compare the count of all elements: their own counts may differ.
  if (!parts.empty()) mine.count = division.all() / std::max<size_t>(1, send.type.bytes());
  team.Run(mine, division.all(), [&](Handle handle, cuda::Stream stream) {
    Group group(handle, stream);
    for (int k = 1; k < n; ++k) {
      const int to = (me + k) % n;
      const int from = (me + n - k) % n;
      group.Send(send.begin() + division.sent(me, to), division.part(me, to), to);
      group.Receive(recv.begin() + division.received(from, me), division.part(from, me), from);
    }
    return group.called();
  });
  team.Copy(send.begin() + division.sent(me, me), recv.begin() + division.received(me, me),
            division.part(me, me));
}

void NcclEndpoint::Permute(const Buffer& send, const Sources& sources, TeamId team_id,
                           uint8_t flags, const Buffer& recv) {
  Team team(communicators_, team_id);
  const int n = team.size();
  const int me = team.index();
  RequireType("permute", send, recv);
  RequireCount("permute", "recv", recv.count, send.count);
  if (sources.size() != static_cast<size_t>(n)) {
    Fail(kind::kValue, "permute: ", sources.size(), " sources for a team of ", n,
         "; each member has one, -1 for none");
  }
  for (int64_t source : sources) {
    if (source >= -1 && source < n) continue;
    Fail(kind::kValue, "permute: there is no source ", source, " in a team of ", n,
         "; it is an index in the team, from 0 on, or -1 for none");
  }
  RequireApart("permute", send, recv);
  const int from = static_cast<int>(sources[static_cast<size_t>(me)]);
  Descriptor mine = About("permute", send.type, send.count, flags);
  mine.layout_hash = HashOf(sources);
  team.Run(mine, send.bytes(), [&](Handle handle, cuda::Stream stream) {
    Group group(handle, stream);
    for (int to = 0; to < n; ++to) {
      if (to != me && sources[static_cast<size_t>(to)] == me) {
        group.Send(send.begin(), send.bytes(), to);
      }
    }
    if (from >= 0 && from != me) group.Receive(recv.begin(), recv.bytes(), from);
    return group.called();
  });
  if (from == me) team.Copy(send.begin(), recv.begin(), send.bytes());
  if (from >= 0 || recv.bytes() == 0) return;
  const cuda::Device& device = communicators_.device();
  const cuda::Here here(device);
  device.driver().cuMemsetD8Async("to clear memory", reinterpret_cast<cuda::Address>(recv.data), 0,
                                  recv.bytes(), communicators_.stream());
}

}  // namespace tvm_ipc::nccl
