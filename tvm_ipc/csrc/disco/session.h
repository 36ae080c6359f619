/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file session.h
 * \brief A Disco session and its hub: how the controller starts the backend, hears of errors and
 *        moves values. The workers' side is in worker.h.
 */
#ifndef TVM_IPC_DISCO_SESSION_H_
#define TVM_IPC_DISCO_SESSION_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/disco/session.h>

#include <string>
#include <vector>

#include "core/hub.h"

namespace tvm_ipc {

namespace controller {

using tvm::runtime::Session;

/*! \brief What sessions use that name nothing else, and are given. */
HubOptions WithDefaults(double timeout_seconds, int64_t arena_bytes);
/*! \brief The nodes of a session, as callers give them. */
std::vector<NodePlace> PlacesOf(const tvm::ffi::Array<tvm::ffi::String>& names,
                                const tvm::ffi::Shape& ranks);
/*! \brief What sessions use that name nothing else. */
void Configure(double timeout_seconds, int64_t arena_bytes, std::string instruction_set);
/*!
 * \brief Make the hub and invite the workers. Zeros mean the configured values.
 * \param join The name of the function by which a worker joins.
 * \param room Bytes of commands that the workers may leave unread.
 */
void Open(Session session, const Backend& backend, const std::string& join,
          const Backend* otherwise, tvm::ffi::Shape device_ids, double timeout_seconds,
          int64_t arena_bytes, int64_t room);
/*!
 * \brief The same where there are several nodes, whose hubs are open (node.h).
 * \param names What errors call the nodes.
 * \param ranks How many ranks each has, in the order of the ranks.
 * \param invitations Of each node's hub.
 * \param links Of each node, the connection to its hub, as in Hub::Attach; owned from now on.
 */
void OpenNodes(Session session, const Backend& backend, const std::string& join,
               tvm::ffi::Shape device_ids, double timeout_seconds, int64_t room,
               tvm::ffi::Array<tvm::ffi::String> names, tvm::ffi::Shape ranks,
               tvm::ffi::Array<tvm::ffi::Bytes> invitations, tvm::ffi::Shape links);
bool WaitJoined(Session session, double seconds);
/*! \brief Send a command: see Outbox::Send. The first argument is the session. */
void Send(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*! \brief A function that every worker has; without it they end. */
tvm::runtime::DRef GetFunction(Session session, tvm::ffi::String name);
void SendTicket(Session session, tvm::runtime::DRef done, int64_t ticket);
int Wait(Session session, int64_t ticket, double seconds);
tvm::ffi::String Report(Session session);
/*! \brief Whether the invitation is that of a session of this process. */
bool HasInvited(const std::string& invitation);
/*! \brief Tell the hub that sent the invitation, if it is in this process, why a rank is missing.
 */
bool ReportMissing(const std::string& invitation, const RankReport& error);
/*! \brief Returns a function that takes the value which worker::Fetch sends for the key. */
tvm::ffi::Function Expect(Session session, int64_t key);
/*! \brief The id of the team of these ranks: see core/teams.h. */
int TeamOfRanks(Session session, tvm::ffi::Shape ranks, int64_t copy);
void Recover(Session session);
void Abort(Session session);
void Close(Session session);
/*! \brief Whether every worker left within the time. */
bool WaitLeft(Session session, double seconds);
/*! \brief Let the program end with exit code 1 where it would end with 0. */
void FailAtExit();
/*! \brief The session of a reference; null if it was detached. */
tvm::ffi::ObjectRef SessionOf(tvm::runtime::DRef reference);
/*! \brief The rank of the calling thread, if it is a worker of the session; else -1. */
int RankHere(tvm::ffi::Optional<Session> session);
/*! \brief Leave a value where worker 0, a thread of this process, finds it. */
int64_t Put(Session session, tvm::ffi::Any value);

}  // namespace controller

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_SESSION_H_
