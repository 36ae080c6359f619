/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file node.h
 * \brief The hub of a node, in the process of the node's agent. The controller's is in session.h.
 */
#ifndef TVM_IPC_DISCO_NODE_H_
#define TVM_IPC_DISCO_NODE_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <memory>
#include <string>

#include "core/hub.h"

namespace tvm_ipc::node {

/*!
 * \brief Open the hub of a node. What is returned stands for it (HubOf), and keeps it open.
 * \param names What errors call the nodes.
 * \param ranks How many ranks each has, in the order of the ranks.
 * \param node Which of them this is.
 * \param flat Whether sums across nodes have one machine's bits.
 */
tvm::ffi::ObjectRef Open(const Backend& backend, tvm::ffi::Array<tvm::ffi::String> names,
                         tvm::ffi::Shape ranks, int64_t node, double timeout_seconds,
                         int64_t arena_bytes, const std::string& instruction_set, bool flat);
tvm::ffi::Bytes InvitationTo(tvm::ffi::ObjectRef node);
/*! \brief A proven connection to the controller's hub; owned from now on. */
void Attach(tvm::ffi::ObjectRef node, int64_t socket);
/*! \brief Close it, as soon as nobody holds the hub any more. */
void Close(tvm::ffi::ObjectRef node);

/*! \brief The hub that an object stands for; an error once it is closed. */
std::shared_ptr<Hub> HubOf(const tvm::ffi::ObjectRef& node);

}  // namespace tvm_ipc::node
#endif  // TVM_IPC_DISCO_NODE_H_
