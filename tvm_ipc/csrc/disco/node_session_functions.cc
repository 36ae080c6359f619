/* SPDX-License-Identifier: Apache-2.0 */
/*! \file node_session_functions.cc */
#include "disco/node_session_functions.h"

#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/file_descriptor_and_memory_file.h"
#include "disco/controller_session_functions.h"

namespace tvm_ipc::node {

namespace ffi = tvm::ffi;

namespace {

class NodeObj : public ffi::Object {
 public:
  explicit NodeObj(std::shared_ptr<SessionServer> server) : server_(std::move(server)) {}

  std::shared_ptr<SessionServer> server() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return server_;
  }
  /*! \brief Return the server and give up its ownership. */
  std::shared_ptr<SessionServer> Give() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(server_, nullptr);
  }
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("tvm_ipc.Node", NodeObj, ffi::Object);

 private:
  mutable std::mutex mutex_;
  mutable std::shared_ptr<SessionServer> server_;
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
  SessionServerOptions options = controller::WithDefaults(timeout_seconds, arena_bytes);
  options.backend = &backend;
  options.nodes = controller::MakeNodeSpecs(names, ranks);
  options.num_ranks = 0;
  for (const NodeSpec& place : options.nodes) options.num_ranks += place.ranks;
  options.node = static_cast<int>(node);
  options.instruction_set = instruction_set;
  options.flat = flat;
  return ffi::ObjectRef(ffi::make_object<NodeObj>(std::make_shared<SessionServer>(options)));
}

ffi::Bytes InvitationTo(ffi::ObjectRef node) { return ffi::Bytes(ServerOf(node)->invitation()); }

void Attach(ffi::ObjectRef node, int64_t socket) {
  File file(static_cast<int>(socket));
  ServerOf(node)->Attach(-1, std::move(file));
}

void Close(ffi::ObjectRef node) { Require(node).Give(); }

std::shared_ptr<SessionServer> ServerOf(const ffi::ObjectRef& node) {
  auto server = Require(node).server();
  if (server == nullptr) Fail(kind::kRuntime, "the session server of this node is closed");
  return server;
}

}  // namespace tvm_ipc::node
