/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file start_session_with_backend.h
 * \brief Starts sessions with a backend that callers name: on the controller, on the nodes and in
 *        the workers.
 */
#ifndef TVM_IPC_START_SESSION_WITH_BACKEND_H_
#define TVM_IPC_START_SESSION_WITH_BACKEND_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <string>

#include "core/communication_backend.h"
#include "disco/controller_session_functions.h"

namespace tvm_ipc {

/*! \brief Return the prefix of the names of a backend's functions. */
std::string PrefixOf(const Backend& backend);
/*! \brief See controller::Open. */
void Open(controller::Session session, tvm::ffi::String backend, tvm::ffi::String otherwise,
          tvm::ffi::Shape device_ids, double timeout_seconds, int64_t arena_bytes, int64_t room);
/*! \brief See controller::OpenNodes. */
void OpenNodes(controller::Session session, tvm::ffi::String backend, tvm::ffi::Shape device_ids,
               double timeout_seconds, int64_t room, tvm::ffi::Array<tvm::ffi::String> names,
               tvm::ffi::Shape ranks, tvm::ffi::Array<tvm::ffi::Bytes> invitations,
               tvm::ffi::Shape links);
/*! \brief See node::Open. */
tvm::ffi::ObjectRef OpenNode(tvm::ffi::String backend, tvm::ffi::Array<tvm::ffi::String> names,
                             tvm::ffi::Shape ranks, int64_t node, double timeout_seconds,
                             int64_t arena_bytes, tvm::ffi::String instruction_set, bool flat);
/*! \brief See controller::Configure. */
void Configure(double timeout_seconds, int64_t arena_bytes, tvm::ffi::String instruction_set);
/*! \brief See worker::InitCCLPerWorker. */
void InitWorker(const Backend& backend, tvm::ffi::Shape device_ids, tvm::ffi::Bytes invitation);

}  // namespace tvm_ipc
#endif  // TVM_IPC_START_SESSION_WITH_BACKEND_H_
