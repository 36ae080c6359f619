/* SPDX-License-Identifier: Apache-2.0 */
/*! \file serve_mpi_for_node_agent.cc */
#include "engine/serve_mpi_for_node_agent.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/internode_request_queue_engine_side.h"
#include "disco/node_session_functions.h"
#include "engine/internode_progress_engine.h"
#include "engine/mpi_library.h"
#include "engine/mpi_transport.h"

namespace tvm_ipc::node {

namespace ffi = tvm::ffi;

namespace {

class NodeRingObj : public ffi::Object {
 public:
  explicit NodeRingObj(std::shared_ptr<Segments> segments) : ring(std::move(segments)) {}

  mutable EngineRing ring;
  mutable std::atomic<bool> stopped{false};
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("tvm_ipc.NodeRing", NodeRingObj, ffi::Object);
};

const NodeRingObj& RequireRing(const ffi::ObjectRef& ring) {
  const auto* object = ring.as<NodeRingObj>();
  if (object == nullptr)
    Fail(kind::kType, "this is not an object that tvm_ipc.node.ring has returned");
  return *object;
}

}  // namespace

ffi::ObjectRef RingOf(ffi::ObjectRef node) {
  auto segments = ServerOf(node)->segments();
  if (segments == nullptr) Fail(kind::kRuntime, "a session of one machine has no internode rings");
  return ffi::ObjectRef(ffi::make_object<NodeRingObj>(std::move(segments)));
}

void ServeMpi(ffi::ObjectRef ring, ffi::String library, ffi::Shape handles, ffi::Shape sizes,
              int64_t any_tag) {
  const NodeRingObj& served = RequireRing(ring);
  if (handles.size() != 3 || sizes.size() != 2 || sizes[0] <= 0 || sizes[1] <= 0) {
    Fail(kind::kValue, "needed are 3 handles and 2 sizes above 0 of MPI, and there are ",
         handles.size(), " and ", sizes.size());
  }
  const auto handle = [&](size_t i) { return static_cast<engine::MpiHandle>(handles[i]); };
  const engine::MpiFunctions functions = engine::FindMpi(std::string(library));
  engine::MpiTransport transport(functions,
                                 {handle(0), handle(1), handle(2), static_cast<int>(any_tag),
                                  static_cast<size_t>(sizes[0]), static_cast<size_t>(sizes[1])},
                                 served.ring.nodes(), served.ring.node());
  engine::Serve(served.ring, transport, served.stopped);
}

void Stop(ffi::ObjectRef ring) {
  const NodeRingObj& served = RequireRing(ring);
  served.stopped.store(true, std::memory_order_release);
  served.ring.WakeEngine();
}

int64_t LargestTag() { return kLargestTag; }

}  // namespace tvm_ipc::node
