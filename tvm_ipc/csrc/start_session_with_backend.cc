/* SPDX-License-Identifier: Apache-2.0 */
/*! \file start_session_with_backend.cc */
#include "start_session_with_backend.h"

#include "backends.h"
#include "core/error.h"
#include "disco/node_session_functions.h"
#include "disco/worker_session_functions.h"

namespace tvm_ipc {

namespace ffi = tvm::ffi;

std::string PrefixOf(const Backend& backend) { return Text("runtime.disco.", backend.name(), "."); }

void Open(controller::Session session, ffi::String backend, ffi::String otherwise,
          ffi::Shape device_ids, double timeout_seconds, int64_t arena_bytes, int64_t room) {
  const Backend& found = FindBackend(backend);
  const Backend* next = otherwise.empty() ? nullptr : &FindBackend(otherwise);
  controller::Open(session, found, PrefixOf(found) + "init_ccl_per_worker", next, device_ids,
                   timeout_seconds, arena_bytes, room);
}

void OpenNodes(controller::Session session, ffi::String backend, ffi::Shape device_ids,
               double timeout_seconds, int64_t room, ffi::Array<ffi::String> names,
               ffi::Shape ranks, ffi::Array<ffi::Bytes> invitations, ffi::Shape links) {
  const Backend& found = FindBackend(backend);
  controller::OpenNodes(session, found, PrefixOf(found) + "init_ccl_per_worker", device_ids,
                        timeout_seconds, room, names, ranks, invitations, links);
}

ffi::ObjectRef OpenNode(ffi::String backend, ffi::Array<ffi::String> names, ffi::Shape ranks,
                        int64_t node, double timeout_seconds, int64_t arena_bytes,
                        ffi::String instruction_set, bool flat) {
  return node::Open(FindBackend(backend), names, ranks, node, timeout_seconds, arena_bytes,
                    instruction_set, flat);
}

void Configure(double timeout_seconds, int64_t arena_bytes, ffi::String instruction_set) {
  for (const Backend* backend : Backends()) {
    if (!backend->UseInstructionSet(instruction_set)) {
      Fail(kind::kValue, "this machine has no instruction set ", std::string(instruction_set));
    }
  }
  controller::Configure(timeout_seconds, arena_bytes, instruction_set);
}

void InitWorker(const Backend& backend, ffi::Shape device_ids, ffi::Bytes invitation) {
  worker::InitCCLPerWorker(backend, FindBackend, device_ids, invitation);
}

}  // namespace tvm_ipc
