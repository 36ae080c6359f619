/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file value_transfer.cc
 * \brief Transfers values between the controller and its workers.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "core/frame.h"
#include "disco/controller_session_functions.h"
#include "disco/controller_worker0_value_exchange.h"
#include "disco/serialize_worker_values.h"
#include "disco/tensor_to_buffer.h"
#include "disco/worker_session_functions.h"

namespace tvm_ipc::worker {

namespace ffi = tvm::ffi;
using tvm::runtime::Tensor;

namespace {

/*! \brief Marks the description of a tensor that is fetched separately
 *         (runtime/oversized_calls_and_tensors.py). */
constexpr char kLargeTensor[] = "tvm_ipc: a large tensor";

/*! \brief Return the controller's tensor of a copy from or to worker 0; throw unless `remote` has
 *         the same type and size. */
Tensor TakeHostTensor(const char* what, int64_t key, const ffi::Optional<Tensor>& remote) {
  ffi::Any value;
  if (!LocalValues::Global().Take(key, &value)) {
    Fail(kind::kRuntime, what, ": the controller's array is gone");
  }
  Tensor host = value.cast<Tensor>();
  if (!remote.has_value()) {
    Fail(kind::kValue, what,
         ": worker 0 has no tensor there; the call that should have made it"
         " returned nothing");
  }
  const Tensor& other = remote.value();
  const ElementType a{host->dtype.code, host->dtype.bits, host->dtype.lanes};
  const ElementType b{other->dtype.code, other->dtype.bits, other->dtype.lanes};
  if (host.Shape().Product() != other.Shape().Product() || a != b) {
    Fail(kind::kValue, what, ": the controller's array has ", host.Shape().Product(), " x ",
         Name(a), ", worker 0's has ", other.Shape().Product(), " x ", Name(b));
  }
  return host;
}

/*! \brief Send the controller's array, through memory of the rank's device if it is elsewhere. */
void SendArray(Rank& rank, const Tensor& array, int receiver) {
  const DLTensor* view = array.operator->();
  if (view->device.device_type == DeviceOf(rank).device_type) {
    return rank.endpoint().Send(ViewBuffer(rank, view, "the controller's array"), receiver);
  }
  Buffer host;
  host.data = static_cast<uint8_t*>(view->data) + view->byte_offset;
  host.count = static_cast<size_t>(array.Shape().Product());
  host.type = ElementType{view->dtype.code, view->dtype.bits, view->dtype.lanes};
  // Staged in the arena, because freeing TVM's memory would wait for the whole device, on which a
  // peer's kernel may wait for this rank.
  const std::shared_ptr<Heap> heap = rank.endpoint().heap();
  const std::shared_ptr<void> staged(heap->Allocate(host.bytes()),
                                     [&](void* data) { heap->Free(data, host.bytes()); });
  Buffer copy = host;
  copy.data = staged.get();
  rank.endpoint().Copy(host, copy);
  rank.endpoint().Send(copy, receiver);
  rank.endpoint().Synchronise();  // the staged copy is read until then
}

}  // namespace

void Fetch(ffi::Any value, int rank, int64_t key) {
  Rank& self = RequireRank();
  if (self.id() != rank) return;
  self.endpoint().Synchronise();  // TVM's copies ignore the stream
  if (controller::HasInvited(OwnInvitation())) {
    HostFetches::Global().Deliver(key, std::move(value));
  } else {
    self.connection().Send(FrameType::kValue, AsBytes(key) + PackValue(value));
  }
}

void FetchLimited(ffi::Any value, int rank, int64_t key, int64_t most) {
  if (RequireRank().id() != rank) return;
  const auto tensor = value.as<Tensor>();
  const bool is_sent = !controller::HasInvited(OwnInvitation());
  // None is an undefined tensor.
  if (is_sent && tensor && tensor->defined() && (*tensor)->dtype.bits >= 8 &&
      (*tensor)->dtype.lanes == 1) {
    const DLTensor& view = *tensor->operator->();
    if (view.device.device_type == kDLCPU && ffi::GetDataSize(view) > static_cast<size_t>(most) &&
        ffi::IsContiguous(view)) {
      value = ffi::Array<ffi::Any>(
          {ffi::String(kLargeTensor), ffi::Any(ffi::Shape(tensor->Shape())), ffi::Any(view.dtype)});
    }
  }
  Fetch(std::move(value), rank, key);
}

Tensor TensorOfBytes(ffi::Bytes bytes, ffi::Shape shape, DLDataType dtype) {
  Tensor tensor = Tensor::Empty(shape, dtype, DeviceOfThread());
  if (bytes.size() != ffi::GetDataSize(*tensor.operator->())) {
    Fail(kind::kValue, "tensor of bytes: there are ", bytes.size(), " bytes for a tensor of ",
         ffi::GetDataSize(*tensor.operator->()));
  }
  tensor.CopyFromBytes(bytes.data(), bytes.size());
  return tensor;
}

ffi::Any TakeFromHost(int64_t key, ffi::Any otherwise) {
  if (RequireRank().id() != 0) return otherwise;
  ffi::Any value;
  if (!LocalValues::Global().Take(key, &value)) {
    Fail(kind::kRuntime, "the controller's array is gone");
  }
  return value;
}

void CopyFromHost(int64_t key, int receiver, ffi::Optional<Tensor> target) {
  Rank& rank = RequireRank();
  if (rank.id() == receiver && receiver == 0) {
    Tensor host = TakeHostTensor("copy to worker 0", key, target);
    target.value().CopyFrom(host);
  } else if (rank.id() == 0) {
    ffi::Any value;
    if (!LocalValues::Global().Take(key, &value))
      Fail(kind::kRuntime, "the controller's array is gone");
    SendArray(rank, value.cast<Tensor>(), receiver);
  } else if (rank.id() == receiver) {
    if (!target.has_value()) {
      Fail(kind::kValue, "copy to worker ", receiver,
           ": it has no tensor there; the call that"
           " should have made it returned nothing");
    }
    rank.endpoint().Receive(ViewBuffer(rank, target.value().operator->(), "the worker's tensor"),
                            0);
  }
}

void CopyToHost(int64_t key, ffi::Optional<Tensor> source) {
  Rank& rank = RequireRank();
  if (rank.id() != 0) return;
  rank.endpoint().Synchronise();
  Tensor host = TakeHostTensor("copy_from_worker_0", key, source);
  host.CopyFrom(source.value());
}

}  // namespace tvm_ipc::worker
