/* SPDX-License-Identifier: Apache-2.0 */
/*! \file check_collective_arguments.cc */
#include "core/check_collective_arguments.h"

#include "core/error.h"
#include "core/ragged_rows.h"
#include "core/rank_runtime_state.h"

namespace tvm_ipc {

namespace {

/*! \brief More elements than any tensor has; the sum over all workers does not overflow. */
constexpr int64_t kMostElements = int64_t{1} << 48;

/*! \brief The first source if the target, which the program computes, is not in the team. */
constexpr int64_t kNoTarget = -2;
/*! \brief A source that the program computes and that is negative. */
constexpr int64_t kNoSource = -3;

struct NamedBuffer {
  const char* name;
  const Buffer& buffer;
};

void RequireType(const char* op, const Buffer& send, const Buffer& recv) {
  if (send.type == recv.type) return;
  Fail(kind::kValue, op, ": send is ", Name(send.type), ", recv is ", Name(recv.type));
}

void RequireCount(const char* op, const Buffer& send, const Buffer& recv) {
  if (send.count == recv.count) return;
  Fail(kind::kValue, op, ": send has ", send.count, " elements, recv has ", recv.count);
}

void RequireEqual(const char* op, const NamedBuffer& one, const NamedBuffer& other) {
  if (one.buffer.type == other.buffer.type && one.buffer.count == other.buffer.count) return;
  Fail(kind::kValue, op, ": ", one.name, " has ", one.buffer.count, " x ", Name(one.buffer.type),
       ", ", other.name, " has ", other.buffer.count, " x ", Name(other.buffer.type),
       "; they must be equal");
}

void RequireApart(const char* op, const Buffer& send, const Buffer& recv) {
  if (!send.Overlaps(recv)) return;
  Fail(kind::kValue, op,
       ": send and recv overlap, but peers read the one while the other is written; they must be"
       " apart");
}

/*! \brief Throw if a slice overlaps the whole elsewhere than at the member's own position, where
 *         the data stays. */
void RequireInPlaceOrApart(const char* op, const Buffer& whole, const Buffer& slice, int index) {
  if (!whole.Overlaps(slice)) return;
  if (slice.begin() == whole.begin() + static_cast<size_t>(index) * slice.bytes()) return;
  Fail(kind::kValue, op, ": send and recv overlap, but not at the position where the data stays");
}

void CheckSlicesOfSend(const char* op, const Call& call, int size, bool reduces) {
  const auto members = static_cast<size_t>(size);
  if (reduces) {
    if (call.send.type == call.recv.type && call.send.count == call.recv.count * members) return;
    Fail(kind::kValue, op, ": send has ", call.send.count, " x ", Name(call.send.type),
         ", recv has ", call.recv.count, " x ", Name(call.recv.type), "; send must have ", size,
         " times as many of the same type");
  }
  RequireType(op, call.send, call.recv);
  if (call.send.count % members != 0) {
    Fail(kind::kValue, op, ": ", call.send.count, " elements cannot be divided evenly among ", size,
         " workers");
  }
  if (call.send.count / members != call.recv.count) {
    Fail(kind::kValue, op, ": a part of send has ", call.send.count / members,
         " elements, recv has ", call.recv.count);
  }
}

void CheckSlicesOfRecv(const char* op, const Call& call, int size) {
  RequireType(op, call.send, call.recv);
  if (call.recv.count == call.send.count * static_cast<size_t>(size)) return;
  Fail(kind::kValue, op, ": recv has ", call.recv.count, " elements, needed are ", size, " x ",
       call.send.count);
}

void CheckSplits(const char* op, const Call& call, size_t n, size_t me) {
  const NumberView& parts = call.layout;
  if (call.send.type != call.recv.type || parts.empty()) {
    RequireEqual(op, {"send", call.send}, {"recv", call.recv});
  }
  if (parts.empty()) {
    if (call.send.count % n == 0) return;
    Fail(kind::kValue, op, ": ", call.send.count, " elements cannot be divided evenly among ", n,
         " workers");
  }
  if (parts.size() != n * n) {
    Fail(kind::kValue, op, ": there are ", parts.size(), " parts; ", n, " workers have ", n * n,
         ", one for each to each, or none where all are equal");
  }
  size_t given = 0;
  size_t taken = 0;
  for (size_t i = 0; i < n * n; ++i) {
    if (parts[i] < 0 || parts[i] > kMostElements) {
      Fail(kind::kValue, op, ": the part of worker ", i / n, " for worker ", i % n, " has ",
           parts[i], " elements");
    }
    if (i / n == me) given += static_cast<size_t>(parts[i]);
    if (i % n == me) taken += static_cast<size_t>(parts[i]);
  }
  if (call.send.count != given || call.recv.count != taken) {
    Fail(kind::kValue, op, ": send has ", call.send.count, " elements and recv ", call.recv.count,
         "; by the parts worker ", me, " gives ", given, " and takes ", taken);
  }
}

void CheckRagged(const char* op, const Call& call, size_t n) {
  const Buffer& counts = call.counts;
  RequireType(op, call.send, call.recv);
  RequireEqual(op, {"counts", counts}, {"recv_counts", call.recv_counts});
  if (counts.type != ElementType{0, 64, 1}) {
    Fail(kind::kValue, op, ": counts has the type ", Name(counts.type), "; it must be int64");
  }
  if (counts.count == 0 || counts.count % n != 0) {
    Fail(kind::kValue, op, ": counts has ", counts.count, " numbers; a team of ", n,
         " has the same number of them for each worker, 1 or more");
  }
  if (counts.count > kMaxRaggedCounts) {
    Fail(kind::kValue, op, ": counts has ", counts.count, " numbers, and the most are ",
         kMaxRaggedCounts);
  }
  if (call.row != 0 && call.recv.count % call.row != 0) {
    Fail(kind::kValue, op, ": recv has ", call.recv.count, " elements, which are no rows of ",
         call.row, ", as many as a row of send has");
  }
  const NamedBuffer buffers[] = {{"send", call.send},
                                 {"counts", counts},
                                 {"recv", call.recv},
                                 {"recv_counts", call.recv_counts}};
  for (size_t output = 2; output < 4; ++output) {
    for (size_t other = 0; other < output; ++other) {
      if (!buffers[output].buffer.Overlaps(buffers[other].buffer)) continue;
      Fail(kind::kValue, op, ": ", buffers[output].name, " overlaps ", buffers[other].name,
           "; outputs must be apart from all else");
    }
  }
}

void CheckSources(const char* op, const NumberView& sources, int size) {
  if (sources.size() != static_cast<size_t>(size)) {
    Fail(kind::kValue, op, ": ", sources.size(), " sources for a team of ", size,
         "; each member has one, -1 for none");
  }
  if (sources[0] == kNoTarget) {
    Fail(kind::kValue, op, ": the target of a send_recv is not an index in its team of ", size,
         "; pass an index from 0 to ", size - 1);
  }
  for (int64_t source : sources) {
    if (source == kNoSource) {
      Fail(kind::kValue, op, ": the source of a send_recv is negative; pass an index from 0 to ",
           size - 1, " in its team");
    }
    if (source >= -1 && source < size) continue;
    Fail(kind::kValue, op, ": there is no source ", source, " in a team of ", size,
         "; it is an index in the team, from 0 on, or -1 for none");
  }
}

void RequireOutputApart(const char* op, const NamedBuffer& output, const NamedBuffer& other) {
  if (!output.buffer.Overlaps(other.buffer)) return;
  Fail(kind::kValue, op, ": ", output.name, " overlaps ", other.name,
       "; outputs must be apart from all else, but residual_out may be residual");
}

void CheckNorm(const char* op, const Call& call) {
  const NamedBuffer send{"send", call.send}, weight{"weight", call.weight}, bias{"bias", call.bias};
  const NamedBuffer residual{"residual", call.residual}, residual_out{"residual_out", call.recv};
  const NamedBuffer norm_out{"norm_out", call.norm_out};
  RequireEqual(op, send, residual);
  RequireEqual(op, send, residual_out);
  if (call.norm_out.count != call.send.count) {
    Fail(kind::kValue, op, ": send has ", call.send.count, " elements, norm_out has ",
         call.norm_out.count, "; they must have as many");
  }
  const size_t row = call.weight.count;
  if (call.bias.exists() && call.bias.count != row) {
    Fail(kind::kValue, op, ": weight has ", row, " elements, bias has ", call.bias.count,
         "; both must have those of a row");
  }
  if (row == 0 ? call.send.count != 0 : call.send.count % row != 0) {
    Fail(kind::kValue, op, ": send has ", call.send.count, " elements, which are no rows of ", row,
         ", as many as weight has");
  }
  for (const NamedBuffer& input : {send, weight, bias}) {
    RequireOutputApart(op, residual_out, input);
    RequireOutputApart(op, norm_out, input);
  }
  RequireOutputApart(op, norm_out, residual);
  RequireOutputApart(op, norm_out, residual_out);
  if (call.recv.data != call.residual.data) RequireOutputApart(op, residual_out, residual);
}

}  // namespace

void Check(const Rank& rank, const Call& call) {
  const int index = rank.FindTeamIndex(call.team);
  if (index >= 0) Check(call, rank.SizeOf(call.team), index);
}

void Check(const Call& call, int size, int index) {
  const CollectiveTraits& traits = TraitsOf(call.collective);
  const char* const op = traits.name;
  const Buffer& send = call.send;
  const Buffer& recv = call.recv;
  if (traits.has_root) {
    if (call.root < 0 || call.root >= size) {
      Fail(kind::kValue, op, ": there is no root ", call.root, " in a team of ", size,
           "; it is an index in the team, from 0 on");
    }
    // Only the root has two buffers.
    if (index != call.root) return;
    if (!send.exists()) Fail(kind::kValue, op, ": the root has nothing to send");
    if (!recv.exists()) Fail(kind::kValue, op, ": the root has nowhere to receive");
  }
  switch (traits.relation) {
    case Relation::kEqual:
      if (traits.reduces) {
        RequireEqual(op, {"send", send}, {"recv", recv});
      } else {
        RequireType(op, send, recv);
        RequireCount(op, send, recv);
      }
      if (!send.Overlaps(recv) || send.data == recv.data) break;
      Fail(kind::kValue, op, ": send and recv overlap in part; they must be equal or apart");
    case Relation::kEqualAndApart:
      RequireEqual(op, {"send", send}, {"recv", recv});
      RequireApart(op, send, recv);
      break;
    case Relation::kSendIsLarger:
      CheckSlicesOfSend(op, call, size, traits.reduces);
      RequireInPlaceOrApart(op, send, recv, index);
      break;
    case Relation::kRecvIsLarger:
      CheckSlicesOfRecv(op, call, size);
      RequireInPlaceOrApart(op, recv, send, index);
      break;
    case Relation::kSplits:
      CheckSplits(op, call, static_cast<size_t>(size), static_cast<size_t>(index));
      RequireApart(op, send, recv);
      break;
    case Relation::kRagged:
      CheckRagged(op, call, static_cast<size_t>(size));
      break;
    case Relation::kNorm:
      CheckNorm(op, call);
      break;
  }
  if (traits.has_sources) CheckSources(op, call.layout, size);
}

int OrderSlices(const Rank& rank, TeamId team, const std::vector<Buffer>& parts, const Buffer& recv,
                const void** sources) {
  const int me = rank.TeamIndex(team, "reduce_slices");
  const int size = rank.SizeOf(team);
  if (parts.size() != static_cast<size_t>(size)) {
    Fail(kind::kValue, "reduce_slices: ", parts.size(), " parts for a team of ", size,
         "; there is one of each member");
  }
  for (int before = 0; before < size; ++before) {
    const Buffer& part = parts[static_cast<size_t>(before)];
    if (part.type != recv.type || part.count != recv.count) {
      Fail(kind::kValue, "reduce_slices: part ", before, " has ", part.count, " x ",
           Name(part.type), ", recv has ", recv.count, " x ", Name(recv.type),
           "; they must be equal");
    }
    if (part.Overlaps(recv)) {
      Fail(kind::kValue, "reduce_slices: part ", before,
           " and recv overlap, but peers may read the one while the other is written");
    }
    sources[(me - before + size) % size] = part.data;
  }
  return size;
}

}  // namespace tvm_ipc
