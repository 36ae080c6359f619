/* SPDX-License-Identifier: Apache-2.0 */
/*! \file argument_checks.cc */
#include "shm/argument_checks.h"

#include "core/error.h"

namespace tvm_ipc {

namespace {

/*! \brief More elements than any tensor has; the sum over all workers does not overflow. */
constexpr int64_t kMostElements = int64_t{1} << 48;

void RequireType(const char* op, const Buffer& send, const Buffer& recv) {
  if (send.type != recv.type) {
    Fail(kind::kValue, op, ": send is ", Name(send.type), ", recv is ", Name(recv.type));
  }
}

/*! \brief Throw if send and recv overlap elsewhere than at `position`: peers may still read send
 * while recv is written. */
void RequireApart(const char* op, const Buffer& send, const Buffer& recv, const uint8_t* position) {
  // Gathers fill recv around send; scatter and broadcast keep a slice of send in its position.
  if (send.Overlaps(recv) &&
      position != (send.bytes() < recv.bytes() ? send.begin() : recv.begin())) {
    Fail(kind::kValue, op, ": send and recv overlap, but not at the position where the data stays");
  }
}

void RequireEqual(const char* op, const Buffer& send, const Buffer& recv) {
  if (send.type == recv.type && send.count == recv.count) return;
  Fail(kind::kValue, op, ": send has ", send.count, " x ", Name(send.type), ", recv has ",
       recv.count, " x ", Name(recv.type), "; they must be equal");
}

}  // namespace

void CheckRoot(const char* operation, int root, int size) {
  if (root >= 0 && root < size) return;
  Fail(kind::kValue, operation, ": there is no root ", root, " in a team of ", size,
       "; it is an index in the team, from 0 on");
}

void CheckAllReduce(const Buffer& send, const Buffer& recv) {
  RequireEqual("allreduce", send, recv);
  if (send.Overlaps(recv) && send.data != recv.data) {
    Fail(kind::kValue, "allreduce: send and recv overlap in part; they must be equal or apart");
  }
}

void CheckReduce(const Buffer& send, bool receives, const Buffer* recv) {
  if (!receives) return;
  if (recv == nullptr) Fail(kind::kValue, "reduce: the root has nowhere to receive");
  RequireEqual("reduce", send, *recv);
  if (send.Overlaps(*recv) && send.data != recv->data) {
    Fail(kind::kValue, "reduce: send and recv overlap in part; they must be equal or apart");
  }
}

void CheckReduceScatter(const Buffer& send, const Buffer& recv, SliceOfTeam part) {
  if (send.type != recv.type || send.count != recv.count * part.members()) {
    Fail(kind::kValue, "reduce_scatter: send has ", send.count, " x ", Name(send.type),
         ", recv has ", recv.count, " x ", Name(recv.type), "; send must have ", part.size,
         " times as many of the same type");
  }
  const uint8_t* own = send.begin() + static_cast<size_t>(part.index) * recv.bytes();
  if (send.Overlaps(recv) && recv.begin() != own) {
    Fail(kind::kValue, "reduce_scatter: send and recv overlap, but recv is not part ", part.index,
         " of send, which it may replace");
  }
}

void CheckAllGather(const Buffer& send, const Buffer& recv, SliceOfTeam part) {
  RequireType("allgather", send, recv);
  if (recv.count != send.count * part.members()) {
    Fail(kind::kValue, "allgather: recv has ", recv.count, " elements, needed are ", part.size,
         " x ", send.count);
  }
  RequireApart("allgather", send, recv,
               recv.begin() + static_cast<size_t>(part.index) * send.bytes());
}

void CheckBroadcast(const Buffer* send, bool sends, const Buffer& recv) {
  if (!sends) return;
  if (send == nullptr) Fail(kind::kValue, "broadcast: the root has nothing to send");
  RequireType("broadcast", *send, recv);
  if (send->count != recv.count) {
    Fail(kind::kValue, "broadcast: send has ", send->count, " elements, recv has ", recv.count);
  }
  RequireApart("broadcast", *send, recv, send->begin());
}

void CheckScatter(const Buffer* send, bool sends, const Buffer& recv, SliceOfTeam part) {
  if (!sends) return;
  if (send == nullptr) Fail(kind::kValue, "scatter: the root has nothing to send");
  RequireType("scatter", *send, recv);
  if (send->count % part.members() != 0) {
    Fail(kind::kValue, "scatter: ", send->count, " elements cannot be divided evenly among ",
         part.size, " workers");
  }
  if (send->count / part.members() != recv.count) {
    Fail(kind::kValue, "scatter: a part of send has ", send->count / part.members(),
         " elements, recv has ", recv.count);
  }
  RequireApart("scatter", *send, recv,
               send->begin() + static_cast<size_t>(part.index) * recv.bytes());
}

void CheckGather(const Buffer& send, bool receives, const Buffer* recv, SliceOfTeam part) {
  if (!receives) return;
  if (recv == nullptr) Fail(kind::kValue, "gather: the root has nowhere to receive");
  RequireType("gather", send, *recv);
  if (recv->count != send.count * part.members()) {
    Fail(kind::kValue, "gather: recv has ", recv->count, " elements, needed are ", part.size, " x ",
         send.count);
  }
  RequireApart("gather", send, *recv,
               recv->begin() + static_cast<size_t>(part.index) * send.bytes());
}

void CheckPermute(const Buffer& send, const Sources& sources, const Buffer& recv,
                  SliceOfTeam part) {
  RequireEqual("permute", send, recv);
  if (sources.size() != part.members()) {
    Fail(kind::kValue, "permute: ", sources.size(), " sources for a team of ", part.size,
         "; each member has one, -1 for none");
  }
  for (int64_t source : sources) {
    if (source < -1 || source >= part.size) {
      Fail(kind::kValue, "permute: there is no source ", source, " in a team of ", part.size,
           "; it is an index in the team, from 0 on, or -1 for none");
    }
  }
  if (send.Overlaps(recv)) {
    Fail(kind::kValue,
         "permute: send and recv overlap, but peers read the one while the other is written; they"
         " must be apart");
  }
}

void CheckAllToAll(const Buffer& send, const SplitCounts& parts, const Buffer& recv,
                   SliceOfTeam part) {
  const size_t n = part.members();
  const auto me = static_cast<size_t>(part.index);
  if (send.type != recv.type || (parts.empty() && send.count != recv.count)) {
    Fail(kind::kValue, "all_to_all: send has ", send.count, " x ", Name(send.type), ", recv has ",
         recv.count, " x ", Name(recv.type), "; they must be equal");
  }
  if (parts.empty() && send.count % n != 0) {
    Fail(kind::kValue, "all_to_all: ", send.count, " elements cannot be divided evenly among ", n,
         " workers");
  }
  if (send.Overlaps(recv)) {
    Fail(kind::kValue,
         "all_to_all: send and recv overlap, but peers read the one while the other"
         " is written; they must be apart");
  }
  if (parts.empty()) return;
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
    if (i / n == me) given += parts[i];
    if (i % n == me) taken += parts[i];
  }
  if (send.count != given || recv.count != taken) {
    Fail(kind::kValue, "all_to_all: send has ", send.count, " elements and recv ", recv.count,
         "; by the parts worker ", me, " gives ", given, " and takes ", taken);
  }
}

}  // namespace tvm_ipc
