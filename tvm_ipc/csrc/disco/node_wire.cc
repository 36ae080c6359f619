/* SPDX-License-Identifier: Apache-2.0 */
/*! \file node_wire.cc */
#include "disco/node_wire.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "core/engine_wire.h"
#include "core/error.h"
#include "disco/node.h"
#include "engine/engine.h"
#include "engine/mpi_library.h"
#include "engine/mpi_transport.h"

namespace tvm_ipc::node {

namespace ffi = tvm::ffi;

namespace {

class NodeWireObj : public ffi::Object {
 public:
  explicit NodeWireObj(std::shared_ptr<Segments> segments) : wire(std::move(segments)) {}

  mutable EngineWire wire;
  mutable std::atomic<bool> stopped{false};
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("tvm_ipc.NodeWire", NodeWireObj, ffi::Object);
};

const NodeWireObj& RequireWire(const ffi::ObjectRef& wire) {
  const auto* object = wire.as<NodeWireObj>();
  if (object == nullptr) Fail(kind::kType, "this is no wire that tvm_ipc.node.wire has returned");
  return *object;
}

}  // namespace

ffi::ObjectRef WireOf(ffi::ObjectRef node) {
  auto segments = HubOf(node)->segments();
  if (segments == nullptr) Fail(kind::kRuntime, "a session of one machine has no wire");
  return ffi::ObjectRef(ffi::make_object<NodeWireObj>(std::move(segments)));
}

void ServeMpi(ffi::ObjectRef wire, ffi::String library, ffi::Shape handles, ffi::Shape sizes,
              int64_t any_tag) {
  const NodeWireObj& served = RequireWire(wire);
  if (handles.size() != 3 || sizes.size() != 2 || sizes[0] <= 0 || sizes[1] <= 0) {
    Fail(kind::kValue, "needed are 3 handles and 2 sizes above 0 of MPI, and there are ",
         handles.size(), " and ", sizes.size());
  }
  const auto handle = [&](size_t i) { return static_cast<engine::MpiHandle>(handles[i]); };
  const engine::MpiFunctions functions = engine::FindMpi(std::string(library));
  engine::MpiTransport transport(functions,
                                 {handle(0), handle(1), handle(2), static_cast<int>(any_tag),
                                  static_cast<size_t>(sizes[0]), static_cast<size_t>(sizes[1])},
                                 served.wire.nodes(), served.wire.node());
  engine::Serve(served.wire, transport, served.stopped);
}

void Stop(ffi::ObjectRef wire) {
  const NodeWireObj& served = RequireWire(wire);
  served.stopped.store(true, std::memory_order_release);
  served.wire.Ring();
}

int64_t LargestTag() { return kLargestTag; }

}  // namespace tvm_ipc::node
