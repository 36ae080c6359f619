/* SPDX-License-Identifier: Apache-2.0 */
/*! \file exposed_tensors_and_slices.cc */
#include "disco/exposed_tensors_and_slices.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "disco/storage.h"
#include "disco/tensor_to_buffer.h"
#include "disco/worker_session_functions.h"

namespace tvm_ipc {

namespace ffi = tvm::ffi;

namespace {

/*! \brief An exposed buffer as a value of programs. */
class ExposedTensor : public ffi::Object {
 public:
  explicit ExposedTensor(ExposedBuffer exposed) : exposed(std::move(exposed)) {}
  ExposedBuffer exposed;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("tvm_ipc.ExposedTensor", ExposedTensor, ffi::Object);
};

ExposedBuffer& ExposedOf(const char* function, ffi::AnyView value) {
  auto* object = const_cast<ExposedTensor*>(value.as<ExposedTensor>());
  if (object != nullptr) return object->exposed;
  Fail(kind::kType, function, ": exposed must be a value that expose returned, not ",
       value.GetTypeKey());
}

/*! \brief Return argument `index` of a function as `T`; `wanted` describes it in the error. */
template <typename T>
T Argument(const char* function, const ffi::PackedArgs& args, int index, const char* wanted) {
  if (index >= 0 && index < args.size()) {
    if (auto value = args[index].try_cast<T>()) return *value;
  }
  Fail(kind::kType, function, ": argument ", index, " is ", wanted, ", not ",
       index >= 0 && index < args.size() ? args[index].GetTypeKey() : "missing");
}

constexpr const char* kTeamWanted = "a team: its id, or a shape that divides the ranks";

/*! \brief Return the arguments from `first` on. The last one is the output. */
std::vector<Buffer> Tensors(const Rank& rank, const char* function, const ffi::PackedArgs& args,
                            int first) {
  std::vector<Buffer> tensors;
  for (int i = first; i < args.size() || i == first; ++i) {
    const auto tensor = Argument<ffi::TensorView>(function, args, i, "a tensor");
    tensors.push_back(ViewBuffer(rank, tensor, function, ": argument ", i));
  }
  return tensors;
}

/*! \brief Computes the byte offset of the slice of the rank `shift` places after this one. */
class SliceOffsets {
 public:
  SliceOffsets(const Rank& rank, const char* function, TeamId team)
      : function_(function),
        team_index_(rank.TeamIndex(team, function)),
        size_(rank.SizeOf(team)) {}

  int64_t operator()(int64_t shift, int64_t stride, int64_t offset) const {
    const int64_t index = (team_index_ + shift % size_ + size_) % size_;
    int64_t at = 0;
    if (__builtin_mul_overflow(index, stride, &at) || __builtin_add_overflow(at, offset, &at)) {
      Fail(kind::kValue, function_, ": ", stride, " bytes for each of ", index, " ranks and ",
           offset, " more exceed the address space");
    }
    return at;
  }

 private:
  const char* function_;
  int64_t team_index_;
  int64_t size_;
};

}  // namespace

ffi::Any ExposeTensor(Rank& rank, ffi::Tensor tensor, TeamArgument team) {
  const Buffer buffer = ViewBuffer(rank, tensor, "expose: the tensor");
  const TeamId id = TeamFor(rank, "expose", team);
  auto keep = std::make_shared<ffi::Tensor>(std::move(tensor));
  return ffi::ObjectRef(
      ffi::make_object<ExposedTensor>(rank.endpoint().Expose(buffer, id, std::move(keep))));
}

ffi::Tensor PeerViewTensor(Rank& rank, ffi::Any value, int64_t shift, ffi::Shape shape) {
  ExposedBuffer& exposed = ExposedOf("peer_view", value);
  const ElementType type = exposed.memory.type;
  const DLDataType dtype{type.code, type.bits, type.lanes};
  size_t count = 1;
  for (int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(count, static_cast<size_t>(extent), &count)) {
      Fail(kind::kValue, "peer_view: the shape has the extent ", extent,
           ", which is negative or too large");
    }
  }
  if (count != exposed.memory.count) {
    Fail(kind::kValue, "peer_view: ", exposed.memory.count, " x ", Name(type),
         " were exposed, but the shape has ", count, " elements; the numbers must be equal");
  }
  struct Inside {
    PeerMemory memory;
    void AllocData(DLTensor* tensor) { tensor->data = memory.data; }
    void FreeData(DLTensor*) {}
  };
  return ffi::Tensor::FromNDAlloc(Inside{rank.endpoint().PeerView(exposed, shift)}, shape, dtype,
                                  DeviceOf(rank));
}

void ReleaseTensors(ffi::PackedArgs args, ffi::Any* result) {
  Rank& rank = RequireRank();
  const TeamId team =
      TeamFor(rank, "release", Argument<TeamArgument>("release", args, 0, kTeamWanted));
  std::vector<const ExposedBuffer*> exposed;
  for (int i = 1; i < args.size(); ++i) exposed.push_back(&ExposedOf("release", args[i]));
  rank.endpoint().Release(team, exposed);
}

ffi::Tensor OwnSliceTensor(Rank& rank, ffi::Tensor tensor, TeamArgument team, int64_t shift,
                           int64_t stride, int64_t offset, ffi::Shape shape) {
  const SliceOffsets offset_of(rank, "own_slice", TeamFor(rank, "own_slice", team));
  return ViewFor("own_slice", std::move(tensor), offset_of(shift, stride, offset),
                 std::move(shape));
}

void ReduceSlices(ffi::PackedArgs args, ffi::Any* result) {
  constexpr const char* kName = "reduce_slices";
  Rank& rank = RequireRank();
  const ReduceKind kind =
      ReduceKindOf(kName, Argument<int64_t>(kName, args, 0, "the number of a reduction"));
  const TeamId team = TeamFor(rank, kName, Argument<TeamArgument>(kName, args, 1, kTeamWanted));
  std::vector<Buffer> slices = Tensors(rank, kName, args, 2);
  const Buffer recv = slices.back();
  slices.pop_back();
  rank.endpoint().ReduceSlices(kind, team, slices, recv);
}

void AssembleSlices(ffi::PackedArgs args, ffi::Any* result) {
  constexpr const char* kName = "assemble";
  Rank& rank = RequireRank();
  const SliceOffsets offset_of(
      rank, kName, TeamFor(rank, kName, Argument<TeamArgument>(kName, args, 0, kTeamWanted)));
  const auto positions =
      Argument<ffi::Shape>(kName, args, 1, "a shape with three numbers for each slice");
  std::vector<Buffer> slices = Tensors(rank, kName, args, 2);
  const Buffer recv = slices.back();
  slices.pop_back();
  if (positions.size() != 3 * slices.size()) {
    Fail(kind::kValue, "assemble: ", positions.size(), " numbers for ", slices.size(),
         " slices; each needs a shift, a stride and an offset");
  }
  for (size_t k = 0; k < slices.size(); ++k) {
    const Buffer& slice = slices[k];
    const int64_t at = offset_of(positions[3 * k], positions[3 * k + 1], positions[3 * k + 2]);
    if (slice.type != recv.type) {
      Fail(kind::kValue, "assemble: slice ", k, " is ", Name(slice.type), ", recv is ",
           Name(recv.type));
    }
    if (at < 0 || slice.bytes() > recv.bytes() ||
        static_cast<size_t>(at) > recv.bytes() - slice.bytes()) {
      Fail(kind::kValue, "assemble: slice ", k, " of ", slice.bytes(), " bytes at offset ", at,
           " exceeds recv of ", recv.bytes(), " bytes");
    }
    Buffer target = slice;
    target.data = recv.begin() + at;
    if (slice.begin() == target.begin()) continue;
    if (slice.Overlaps(recv)) {
      Fail(kind::kValue, "assemble: slice ", k, " overlaps recv, but is not at its own position");
    }
    rank.endpoint().Copy(slice, target);
  }
}

}  // namespace tvm_ipc
