/* SPDX-License-Identifier: Apache-2.0 */
/*! \file shows.cc */
#include "disco/shows.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "disco/storage.h"
#include "disco/tensor_view.h"
#include "disco/worker.h"

namespace tvm_ipc {

namespace ffi = tvm::ffi;

namespace {

/*! \brief What is shown, as a value of programs. */
class ShownTensor : public ffi::Object {
 public:
  explicit ShownTensor(Shown shown) : shown(std::move(shown)) {}
  Shown shown;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("tvm_ipc.Shown", ShownTensor, ffi::Object);
};

Shown& ShownOf(const char* function, ffi::AnyView value) {
  auto* object = const_cast<ShownTensor*>(value.as<ShownTensor>());
  if (object != nullptr) return object->shown;
  Fail(kind::kType, function, ": shown is what show returned, not ", value.GetTypeKey());
}

/*! \brief Argument `index` of a function, as `T`. */
template <typename T>
T Argument(const char* function, const ffi::PackedArgs& args, int index, const char* wanted) {
  if (index >= 0 && index < args.size()) {
    if (auto value = args[index].try_cast<T>()) return *value;
  }
  Fail(kind::kType, function, ": argument ", index, " is ", wanted, ", not ",
       index >= 0 && index < args.size() ? args[index].GetTypeKey() : "missing");
}

constexpr const char* kTeamWanted = "a team: its id, or a shape that divides the ranks";

/*! \brief Arguments from one on, of which the last one is what the function writes. */
std::vector<Buffer> Tensors(const Rank& rank, const char* function, const ffi::PackedArgs& args,
                            int first) {
  std::vector<Buffer> tensors;
  for (int i = first; i < args.size() || i == first; ++i) {
    const auto tensor = Argument<ffi::TensorView>(function, args, i, "a tensor");
    tensors.push_back(ViewBuffer(rank, Text(function, ": argument ", i).c_str(), tensor));
  }
  return tensors;
}

/*! \brief Where the part of the rank `shift` places after this one begins, in bytes. */
class Places {
 public:
  Places(const Rank& rank, const char* function, TeamId team)
      : function_(function), place_(rank.PlaceIn(team, function)), size_(rank.SizeOf(team)) {}

  int64_t operator()(int64_t shift, int64_t stride, int64_t offset) const {
    const int64_t place = (place_ + shift % size_ + size_) % size_;
    int64_t at = 0;
    if (__builtin_mul_overflow(place, stride, &at) || __builtin_add_overflow(at, offset, &at)) {
      Fail(kind::kValue, function_, ": ", stride, " bytes for each of ", place, " ranks and ",
           offset, " more are beyond all memory");
    }
    return at;
  }

 private:
  const char* function_;
  int64_t place_;
  int64_t size_;
};

}  // namespace

ffi::Any ShowTensor(Rank& rank, ffi::Tensor tensor, TeamArgument team) {
  const Buffer buffer = ViewBuffer(rank, "show: the tensor", tensor);
  const TeamId id = TeamFor(rank, team);
  auto keep = std::make_shared<ffi::Tensor>(std::move(tensor));
  return ffi::ObjectRef(
      ffi::make_object<ShownTensor>(rank.endpoint().Show(buffer, id, std::move(keep))));
}

ffi::Tensor PeerTensor(Rank& rank, ffi::Any value, int64_t shift, ffi::Shape shape) {
  Shown& shown = ShownOf("peer", value);
  const ElementType type = shown.memory.type;
  const DLDataType dtype{type.code, type.bits, type.lanes};
  size_t count = 1;
  for (int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(count, static_cast<size_t>(extent), &count)) {
      Fail(kind::kValue, "peer: a shape has no extent ", extent);
    }
  }
  if (count != shown.memory.count) {
    Fail(kind::kValue, "peer: ", shown.memory.count, " x ", Name(type),
         " were shown, and the shape has ", count, " elements; they must be as many");
  }
  struct Inside {
    PeerMemory memory;
    void AllocData(DLTensor* tensor) { tensor->data = memory.data; }
    void FreeData(DLTensor*) {}
  };
  return ffi::Tensor::FromNDAlloc(Inside{rank.endpoint().Peer(shown, shift)}, shape, dtype,
                                  DeviceOf(rank));
}

void HideTensors(ffi::PackedArgs args, ffi::Any* result) {
  Rank& rank = RequireRank();
  const TeamId team = TeamFor(rank, Argument<TeamArgument>("hide", args, 0, kTeamWanted));
  std::vector<const Shown*> shown;
  for (int i = 1; i < args.size(); ++i) shown.push_back(&ShownOf("hide", args[i]));
  rank.endpoint().Hide(team, shown);
}

ffi::Tensor PartTensor(Rank& rank, ffi::Tensor tensor, TeamArgument team, int64_t shift,
                       int64_t stride, int64_t offset, ffi::Shape shape) {
  const Places places(rank, "part", TeamFor(rank, team));
  return ViewFor("part", std::move(tensor), places(shift, stride, offset), std::move(shape));
}

void ReduceParts(ffi::PackedArgs args, ffi::Any* result) {
  constexpr const char* kName = "reduce_parts";
  Rank& rank = RequireRank();
  const ReduceKind kind =
      ReduceKindOf(kName, Argument<int64_t>(kName, args, 0, "the number of a reduction"));
  const TeamId team = TeamFor(rank, Argument<TeamArgument>(kName, args, 1, kTeamWanted));
  std::vector<Buffer> parts = Tensors(rank, kName, args, 2);
  const Buffer recv = parts.back();
  parts.pop_back();
  rank.endpoint().ReduceParts(kind, team, parts, recv);
}

void JoinParts(ffi::PackedArgs args, ffi::Any* result) {
  constexpr const char* kName = "join";
  Rank& rank = RequireRank();
  const Places places(rank, kName,
                      TeamFor(rank, Argument<TeamArgument>(kName, args, 0, kTeamWanted)));
  const auto given = Argument<ffi::Shape>(kName, args, 1, "a shape: of each part three numbers");
  std::vector<Buffer> parts = Tensors(rank, kName, args, 2);
  const Buffer recv = parts.back();
  parts.pop_back();
  if (given.size() != 3 * parts.size()) {
    Fail(kind::kValue, "join: ", given.size(), " numbers for ", parts.size(),
         " parts; each has a shift, a stride and an offset");
  }
  for (size_t k = 0; k < parts.size(); ++k) {
    const Buffer& part = parts[k];
    const int64_t at = places(given[3 * k], given[3 * k + 1], given[3 * k + 2]);
    if (part.type != recv.type) {
      Fail(kind::kValue, "join: part ", k, " is ", Name(part.type), ", recv is ", Name(recv.type));
    }
    if (at < 0 || part.bytes() > recv.bytes() ||
        static_cast<size_t>(at) > recv.bytes() - part.bytes()) {
      Fail(kind::kValue, "join: part ", k, " of ", part.bytes(), " bytes at offset ", at,
           " does not lie in recv of ", recv.bytes(), " bytes");
    }
    Buffer target = part;
    target.data = recv.begin() + at;
    if (part.begin() == target.begin()) continue;
    if (part.Overlaps(recv)) {
      Fail(kind::kValue, "join: part ", k, " lies in recv, but not in its place");
    }
    rank.endpoint().Copy(part, target);
  }
}

}  // namespace tvm_ipc
