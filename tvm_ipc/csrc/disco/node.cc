/* SPDX-License-Identifier: Apache-2.0 */
/*! \file node.cc */
#include "disco/node.h"

#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/file.h"
#include "disco/session.h"

namespace tvm_ipc::node {

namespace ffi = tvm::ffi;

namespace {

class NodeObj : public ffi::Object {
 public:
  explicit NodeObj(std::shared_ptr<Hub> hub) : hub_(std::move(hub)) {}

  std::shared_ptr<Hub> hub() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return hub_;
  }
  /*! \brief The hub, which this no longer keeps. */
  std::shared_ptr<Hub> Give() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(hub_, nullptr);
  }
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("tvm_ipc.Node", NodeObj, ffi::Object);

 private:
  mutable std::mutex mutex_;
  mutable std::shared_ptr<Hub> hub_;
};

const NodeObj& Require(const ffi::ObjectRef& node) {
  const auto* object = node.as<NodeObj>();
  if (object == nullptr) Fail(kind::kType, "this is no node that tvm_ipc.node.open has opened");
  return *object;
}

}  // namespace

ffi::ObjectRef Open(const Backend& backend, ffi::Array<ffi::String> names, ffi::Shape ranks,
                    int64_t node, double timeout_seconds, int64_t arena_bytes,
                    const std::string& instruction_set, bool flat) {
  HubOptions options = controller::WithDefaults(timeout_seconds, arena_bytes);
  options.backend = &backend;
  options.nodes = controller::PlacesOf(names, ranks);
  options.num_ranks = 0;
  for (const NodePlace& place : options.nodes) options.num_ranks += place.ranks;
  options.node = static_cast<int>(node);
  options.instruction_set = instruction_set;
  options.flat = flat;
  return ffi::ObjectRef(ffi::make_object<NodeObj>(std::make_shared<Hub>(options)));
}

ffi::Bytes InvitationTo(ffi::ObjectRef node) { return ffi::Bytes(HubOf(node)->invitation()); }

void Attach(ffi::ObjectRef node, int64_t socket) {
  File file(static_cast<int>(socket));
  HubOf(node)->Attach(-1, std::move(file));
}

void Close(ffi::ObjectRef node) { Require(node).Give(); }

std::shared_ptr<Hub> HubOf(const ffi::ObjectRef& node) {
  auto hub = Require(node).hub();
  if (hub == nullptr) Fail(kind::kRuntime, "the hub of this node is closed");
  return hub;
}

}  // namespace tvm_ipc::node
