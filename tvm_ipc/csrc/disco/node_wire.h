/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file node_wire.h
 * \brief The engine (engine/engine.h) of a node's agent, which gives it a thread and what it knows
 * of MPI.
 */
#ifndef TVM_IPC_DISCO_NODE_WIRE_H_
#define TVM_IPC_DISCO_NODE_WIRE_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/string.h>

#include <cstdint>

namespace tvm_ipc::node {

/*! \brief The wire of a node; one thread of the node's agent serves it. */
tvm::ffi::ObjectRef WireOf(tvm::ffi::ObjectRef node);
/*!
 * \brief Move messages by MPI until `Stop`.
 * \param library A loaded one that has MPI's functions, or needs one that has.
 * \param handles Of two communicators of the agents, and of MPI_BYTE.
 * \param sizes Bytes of a request and of a status.
 */
void ServeMpi(tvm::ffi::ObjectRef wire, tvm::ffi::String library, tvm::ffi::Shape handles,
              tvm::ffi::Shape sizes, int64_t any_tag);
/*! \brief Any thread. */
void Stop(tvm::ffi::ObjectRef wire);
/*! \brief What an engine has to be able to tell apart. */
int64_t LargestTag();

}  // namespace tvm_ipc::node
#endif  // TVM_IPC_DISCO_NODE_WIRE_H_
