/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file node_session_functions.h
 * \brief The session server of a node, in the process of the node's agent. For the controller see
 * controller_session_functions.h.
 */
#ifndef TVM_IPC_DISCO_NODE_SESSION_FUNCTIONS_H_
#define TVM_IPC_DISCO_NODE_SESSION_FUNCTIONS_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <memory>
#include <string>

#include "core/session_server.h"

namespace tvm_ipc::node {

/*!
 * \brief Start the session server of a node. The returned object owns it (ServerOf).
 * \param names The names of the nodes in errors.
 * \param ranks The number of ranks of each node, in rank order.
 * \param node The index of this node.
 * \param flat Whether reductions over several nodes have the same bits as on one machine.
 */
tvm::ffi::ObjectRef Open(const Backend& backend, tvm::ffi::Array<tvm::ffi::String> names,
                         tvm::ffi::Shape ranks, int64_t node, double timeout_seconds,
                         int64_t arena_bytes, const std::string& instruction_set, bool flat);
tvm::ffi::Bytes InvitationTo(tvm::ffi::ObjectRef node);
/*! \brief Add an authenticated connection to the controller's server; takes ownership. */
void Attach(tvm::ffi::ObjectRef node, int64_t socket);
/*! \brief Close the server as soon as its last user is gone. */
void Close(tvm::ffi::ObjectRef node);

/*! \brief Return the server of an object; throw if it is closed. */
std::shared_ptr<SessionServer> ServerOf(const tvm::ffi::ObjectRef& node);

}  // namespace tvm_ipc::node
#endif  // TVM_IPC_DISCO_NODE_SESSION_FUNCTIONS_H_
