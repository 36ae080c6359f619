/* SPDX-License-Identifier: Apache-2.0 */
/*! \file buffer_size_and_overlap_checks.cc */
#include "cuda/buffer_size_and_overlap_checks.h"

#include "core/element_type_and_reduce_kind.h"
#include "core/error.h"

namespace tvm_ipc::cuda {

namespace {

/*! \brief More elements than any tensor has, and few enough that their sum over all workers does
 *         not overflow. */
constexpr int64_t kMostElements = int64_t{1} << 48;

struct Named {
  const char* name;
  const Buffer& buffer;
};

void RequireApartOf(const char* operation, const Named& output, const Named& other) {
  if (!output.buffer.Overlaps(other.buffer)) return;
  Fail(kind::kValue, operation, ": ", output.name, " overlaps ", other.name,
       "; outputs must be apart from all else, but residual_out may be residual");
}

}  // namespace

void RequireEqual(const char* operation, const Buffer& send, const Buffer& recv) {
  if (send.type == recv.type && send.count == recv.count) return;
  Fail(kind::kValue, operation, ": send has ", send.count, " x ", Name(send.type), ", recv has ",
       recv.count, " x ", Name(recv.type), "; they must be equal");
}

void RequireType(const char* operation, const Buffer& send, const Buffer& recv) {
  if (send.type == recv.type) return;
  Fail(kind::kValue, operation, ": send is ", Name(send.type), ", recv is ", Name(recv.type));
}

void RequireEqualOrApart(const char* operation, const Buffer& send, const Buffer& recv) {
  if (!send.Overlaps(recv) || send.data == recv.data) return;
  Fail(kind::kValue, operation, ": send and recv overlap in part; they must be equal or apart");
}

void RequireInPlaceOrApart(const char* operation, const Buffer& send, const Buffer& recv,
                           const uint8_t* place) {
  if (!send.Overlaps(recv)) return;
  if (place == (send.bytes() < recv.bytes() ? send.begin() : recv.begin())) return;
  Fail(kind::kValue, operation,
       ": send and recv overlap, but not at the position where the data stays");
}

void RequireApart(const char* operation, const Buffer& send, const Buffer& recv) {
  if (!send.Overlaps(recv)) return;
  Fail(kind::kValue, operation,
       ": send and recv overlap, but peers read the one while the other is written; they must be"
       " apart");
}

void RequireNorm(const char* operation, const Buffer& send, const Buffer& residual,
                 const Norm& norm, const Buffer& residual_out, const Buffer& norm_out) {
  for (const Named& one : {Named{"residual", residual}, Named{"residual_out", residual_out}}) {
    if (one.buffer.type == send.type && one.buffer.count == send.count) continue;
    Fail(kind::kValue, operation, ": send has ", send.count, " x ", Name(send.type), ", ", one.name,
         " has ", one.buffer.count, " x ", Name(one.buffer.type), "; they must be equal");
  }
  if (norm_out.count != send.count) {
    Fail(kind::kValue, operation, ": send has ", send.count, " elements, norm_out has ",
         norm_out.count, "; they must have as many");
  }
  const size_t row = norm.weight.count;
  if (norm.bias != nullptr && norm.bias->count != row) {
    Fail(kind::kValue, operation, ": weight has ", row, " elements, bias has ", norm.bias->count,
         "; both must have those of a row");
  }
  if (row == 0 ? send.count != 0 : send.count % row != 0) {
    Fail(kind::kValue, operation, ": send has ", send.count, " elements, which are no rows of ",
         row, ", as many as weight has");
  }
  for (const Named& input : {Named{"send", send}, Named{"weight", norm.weight},
                             Named{"bias", norm.bias != nullptr ? *norm.bias : norm.weight}}) {
    RequireApartOf(operation, {"residual_out", residual_out}, input);
    RequireApartOf(operation, {"norm_out", norm_out}, input);
  }
  RequireApartOf(operation, {"norm_out", norm_out}, {"residual", residual});
  RequireApartOf(operation, {"norm_out", norm_out}, {"residual_out", residual_out});
  if (residual_out.data != residual.data) {
    RequireApartOf(operation, {"residual_out", residual_out}, {"residual", residual});
  }
}

void RequireParts(const Buffer& send, const SplitCounts& parts, size_t size, size_t place,
                  const Buffer& recv) {
  if (parts.empty()) {
    RequireEqual("all_to_all", send, recv);
    if (send.count % size != 0) {
      Fail(kind::kValue, "all_to_all: ", send.count, " elements cannot be divided evenly among ",
           size, " workers");
    }
    return;
  }
  if (send.type != recv.type) RequireEqual("all_to_all", send, recv);
  if (parts.size() != size * size) {
    Fail(kind::kValue, "all_to_all: there are ", parts.size(), " parts; ", size, " workers have ",
         size * size, ", one for each to each, or none where all are equal");
  }
  size_t given = 0;
  size_t taken = 0;
  for (size_t i = 0; i < size * size; ++i) {
    if (parts[i] < 0 || parts[i] > kMostElements) {
      Fail(kind::kValue, "all_to_all: the part of worker ", i / size, " for worker ", i % size,
           " has ", parts[i], " elements");
    }
    if (i / size == place) given += static_cast<size_t>(parts[i]);
    if (i % size == place) taken += static_cast<size_t>(parts[i]);
  }
  if (send.count != given || recv.count != taken) {
    Fail(kind::kValue, "all_to_all: send has ", send.count, " elements and recv ", recv.count,
         "; by the parts worker ", place, " gives ", given, " and takes ", taken);
  }
}

void RequireSources(const Sources& sources, int size) {
  if (sources.size() != static_cast<size_t>(size)) {
    Fail(kind::kValue, "permute: ", sources.size(), " sources for a team of ", size,
         "; each member has one, -1 for none");
  }
  for (int64_t source : sources) {
    if (source >= -1 && source < size) continue;
    Fail(kind::kValue, "permute: there is no source ", source, " in a team of ", size,
         "; it is an index in the team, from 0 on, or -1 for none");
  }
}

}  // namespace tvm_ipc::cuda
