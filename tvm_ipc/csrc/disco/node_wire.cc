/* SPDX-License-Identifier: Apache-2.0 */
/*! \file node_wire.cc */
#include "disco/node_wire.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "core/engine_wire.h"
#include "core/error.h"
#include "disco/node.h"

namespace tvm_ipc::node {

namespace ffi = tvm::ffi;

namespace {

/*! \brief More than anybody sleeps: an hour. */
constexpr double kLongestSleep = 3600;

class NodeWireObj : public ffi::Object {
 public:
  explicit NodeWireObj(std::shared_ptr<Segments> segments) : wire(std::move(segments)) {}

  mutable EngineWire wire;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("tvm_ipc.NodeWire", NodeWireObj, ffi::Object);
};

EngineWire& RequireWire(const ffi::ObjectRef& wire) {
  const auto* object = wire.as<NodeWireObj>();
  if (object == nullptr) Fail(kind::kType, "this is no wire that tvm_ipc.node.wire has returned");
  return object->wire;
}

}  // namespace

ffi::ObjectRef WireOf(ffi::ObjectRef node) {
  auto segments = HubOf(node)->segments();
  if (segments == nullptr) Fail(kind::kRuntime, "a session of one machine has no wire");
  return ffi::ObjectRef(ffi::make_object<NodeWireObj>(std::move(segments)));
}

int64_t Take(ffi::ObjectRef wire, int64_t address, int64_t most) {
  return static_cast<int64_t>(
      RequireWire(wire).Take(reinterpret_cast<WireWork*>(address), static_cast<size_t>(most)));
}

void Done(ffi::ObjectRef wire, int64_t address, int64_t count) {
  const auto* ended = reinterpret_cast<const Ended*>(address);
  for (int64_t i = 0; i < count; ++i) {
    RequireWire(wire).Done(ended[i].rank, ended[i].request, ended[i].came);
  }
}

bool Sleep(ffi::ObjectRef wire, double seconds) {
  const double most = std::max(0.0, std::min(seconds, kLongestSleep));
  return RequireWire(wire).Sleep(std::chrono::nanoseconds(static_cast<int64_t>(most * 1e9)));
}

void RingBell(ffi::ObjectRef wire) { RequireWire(wire).Ring(); }

int64_t GenerationOf(ffi::ObjectRef wire) { return RequireWire(wire).generation(); }

int64_t FlushedOf(ffi::ObjectRef wire) { return RequireWire(wire).flushed(); }

void SetFlushed(ffi::ObjectRef wire, int64_t generation) {
  RequireWire(wire).Flushed(static_cast<uint32_t>(generation));
}

int64_t LargestTag() { return kLargestTag; }

}  // namespace tvm_ipc::node
