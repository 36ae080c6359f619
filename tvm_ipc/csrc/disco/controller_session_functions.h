/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file controller_session_functions.h
 * \brief The controller's functions on a Disco session: they start the backend, send commands,
 * report errors and move values. The workers' side is in worker_session_functions.h.
 */
#ifndef TVM_IPC_DISCO_CONTROLLER_SESSION_FUNCTIONS_H_
#define TVM_IPC_DISCO_CONTROLLER_SESSION_FUNCTIONS_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/disco/session.h>

#include <string>
#include <vector>

#include "core/session_server.h"

namespace tvm_ipc {

namespace controller {

using tvm::runtime::Session;

/*! \brief Return the configured options; arguments that are not zero take precedence. */
SessionServerOptions WithDefaults(double timeout_seconds, int64_t arena_bytes);
/*! \brief Make the nodes of a session from their names and numbers of ranks. */
std::vector<NodeSpec> MakeNodeSpecs(const tvm::ffi::Array<tvm::ffi::String>& names,
                                    const tvm::ffi::Shape& ranks);
/*! \brief Set the default options of sessions. */
void Configure(double timeout_seconds, int64_t arena_bytes, std::string instruction_set);
/*!
 * \brief Start the session server and let the workers join. Zeros mean the configured values.
 * \param join The name of the function by which a worker joins.
 * \param otherwise The fallback backend; nullptr for none.
 * \param room The number of bytes of commands that may be unread by the workers.
 */
void Open(Session session, const Backend& backend, const std::string& join,
          const Backend* otherwise, tvm::ffi::Shape device_ids, double timeout_seconds,
          int64_t arena_bytes, int64_t room);
/*!
 * \brief Like Open, for a session of several nodes, whose servers already run
 *        (node_session_functions.h).
 * \param names The names of the nodes in errors.
 * \param ranks The number of ranks of each node, in rank order.
 * \param invitations The invitation of each node's server.
 * \param links The descriptor of the connection to each node's server (SessionServer::Attach);
 *        takes ownership.
 */
void OpenNodes(Session session, const Backend& backend, const std::string& join,
               tvm::ffi::Shape device_ids, double timeout_seconds, int64_t room,
               tvm::ffi::Array<tvm::ffi::String> names, tvm::ffi::Shape ranks,
               tvm::ffi::Array<tvm::ffi::Bytes> invitations, tvm::ffi::Shape links);
bool WaitJoined(Session session, double seconds);
/*! \brief Send a command: see CommandQueue::Send. The first argument is the session. */
void Send(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*! \brief Get a function that every worker must have; workers without it end. */
tvm::runtime::DRef GetFunction(Session session, tvm::ffi::String name);
void SendTicket(Session session, tvm::runtime::DRef done, int64_t ticket);
int Wait(Session session, int64_t ticket, double seconds);
tvm::ffi::String Report(Session session);
/*! \brief Return whether the invitation belongs to a session of this process. */
bool HasInvited(const std::string& invitation);
/*! \brief Report why a rank is missing to the session of the invitation; return false if it is not
 *         in this process. */
bool ReportMissing(const std::string& invitation, const RankReport& error);
/*! \brief Return a function that returns the value which worker::Fetch sends for the key. */
tvm::ffi::Function Expect(Session session, int64_t key);
/*! \brief Return the id of the team of these ranks (core/teams.h). */
int TeamOfRanks(Session session, tvm::ffi::Shape ranks, int64_t copy);
void Recover(Session session);
void Abort(Session session);
void Close(Session session);
/*! \brief Wait until every worker has left; return false if the time runs out first. */
bool WaitLeft(Session session, double seconds);
/*! \brief Make the program end with exit code 1 instead of 0. */
void FailAtExit();
/*! \brief Return the session of a reference; null if it was detached. */
tvm::ffi::ObjectRef SessionOf(tvm::runtime::DRef reference);
/*! \brief Return a function that returns whether the session still exists.
 *
 * If its argument is true, the session is never destroyed, as forked children need it: its
 * destructor would join threads that they do not have. While the function exists, no other
 * object has the address of the session. */
tvm::ffi::Function WeakReference(tvm::runtime::Session session);
/*! \brief Return the rank of the calling thread if it is a worker of the session; otherwise -1. */
int RankHere(tvm::ffi::Optional<Session> session);
/*! \brief Store a value for worker 0, a thread of this process; return its key. */
int64_t Put(Session session, tvm::ffi::Any value);

}  // namespace controller

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_CONTROLLER_SESSION_FUNCTIONS_H_
