/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file node_wire.h
 * \brief The engine's side of the wire (core/engine_wire.h) for an engine that is written in
 *        Python.
 */
#ifndef TVM_IPC_DISCO_NODE_WIRE_H_
#define TVM_IPC_DISCO_NODE_WIRE_H_

#include <tvm/ffi/object.h>

#include <cstdint>

namespace tvm_ipc::node {

/*! \brief A message that has ended, as Python writes many of them at once. */
struct Ended {
  int32_t rank;
  int32_t request;
  uint64_t came;
};

/*! \brief The wire of a node; one thread of the node's agent uses it. */
tvm::ffi::ObjectRef WireOf(tvm::ffi::ObjectRef node);
/*! \brief Write what was posted to an array of `WireWork` at an address; how many there were. */
int64_t Take(tvm::ffi::ObjectRef wire, int64_t address, int64_t most);
/*! \brief An array of `Ended` at an address. */
void Done(tvm::ffi::ObjectRef wire, int64_t address, int64_t count);
/*! \brief False if the time is over and nobody rang. */
bool Sleep(tvm::ffi::ObjectRef wire, double seconds);
void RingBell(tvm::ffi::ObjectRef wire);
int64_t GenerationOf(tvm::ffi::ObjectRef wire);
int64_t FlushedOf(tvm::ffi::ObjectRef wire);
void SetFlushed(tvm::ffi::ObjectRef wire, int64_t generation);
/*! \brief What an engine has to be able to tell apart. */
int64_t LargestTag();

}  // namespace tvm_ipc::node
#endif  // TVM_IPC_DISCO_NODE_WIRE_H_
