/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file serve_mpi_for_node_agent.h
 * \brief Functions with which a node's agent runs the engine (engine/internode_progress_engine.h),
 * on a thread of the agent and with its MPI.
 */
#ifndef TVM_IPC_ENGINE_SERVE_MPI_FOR_NODE_AGENT_H_
#define TVM_IPC_ENGINE_SERVE_MPI_FOR_NODE_AGENT_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/string.h>

#include <cstdint>

namespace tvm_ipc::node {

/*! \brief Return the internode rings of a node, which one thread of the node's agent serves. */
tvm::ffi::ObjectRef RingOf(tvm::ffi::ObjectRef node);
/*!
 * \brief Move messages by MPI until `Stop`.
 * \param library A loaded library that has MPI's functions, or depends on one that has.
 * \param handles The handles of two communicators of the agents, and MPI_BYTE.
 * \param sizes The bytes of a request and of a status.
 */
void ServeMpi(tvm::ffi::ObjectRef ring, tvm::ffi::String library, tvm::ffi::Shape handles,
              tvm::ffi::Shape sizes, int64_t any_tag);
/*! \brief End `ServeMpi`. Any thread may call this. */
void Stop(tvm::ffi::ObjectRef ring);
/*! \brief Return the largest message tag, which an engine must support. */
int64_t LargestTag();

}  // namespace tvm_ipc::node
#endif  // TVM_IPC_ENGINE_SERVE_MPI_FOR_NODE_AGENT_H_
