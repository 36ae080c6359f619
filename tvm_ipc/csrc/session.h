/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file session.h
 * \brief A Disco session and its hub: how the controller starts the backend, hears of errors and
 *        moves values, and the worker's side of it.
 */
#ifndef TVM_IPC_SESSION_H_
#define TVM_IPC_SESSION_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/disco/session.h>
#include <tvm/runtime/tensor.h>

#include "group.h"

namespace tvm_ipc {

namespace controller {

using tvm::runtime::Session;

/*! \brief What sessions use that name nothing else. */
void Configure(double timeout_seconds, int64_t arena_bytes, tvm::ffi::String instruction_set);
/*!
 * \brief Make the hub and invite the workers. Zeros mean the configured values.
 * \param room Bytes of commands that the workers may leave unread.
 */
void Open(Session session, tvm::ffi::Shape device_ids, double timeout_seconds, int64_t arena_bytes,
          int64_t room);
bool WaitJoined(Session session, double seconds);
/*! \brief Send a command: see Outbox::Send. The first argument is the session. */
void Send(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*! \brief A function that every worker has; without it they end. */
tvm::runtime::DRef GetFunction(Session session, tvm::ffi::String name);
void SendTicket(Session session, tvm::runtime::DRef done, int64_t ticket);
int Wait(Session session, int64_t ticket, double seconds);
tvm::ffi::String Report(Session session);
/*! \brief Returns a function that takes the value which worker::Fetch sends for the key. */
tvm::ffi::Function Expect(Session session, int64_t key);
void Recover(Session session);
void Abort(Session session);
void Close(Session session);
/*! \brief Whether every worker left within the time. */
bool WaitLeft(Session session, double seconds);
/*! \brief Let the program end with exit code 1 where it would end with 0. */
void FailAtExit();
/*! \brief The session of a reference; null if it was detached. */
tvm::ffi::ObjectRef SessionOf(tvm::runtime::DRef reference);
/*! \brief Leave a value where worker 0, a thread of this process, finds it. */
int64_t Put(Session session, tvm::ffi::Any value);

}  // namespace controller

namespace worker {

void InitCCLPerWorker(tvm::ffi::Shape device_ids, tvm::ffi::Bytes invitation);
/*! \brief Mark this process as a worker, and keep its pipes to itself. */
void ServeParent(int64_t read_fd, int64_t write_fd);
void Guard(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
void Done(int64_t ticket);
void Fetch(tvm::ffi::Any value, int rank, int64_t key);
void CopyFromHost(int64_t key, int receiver, tvm::ffi::Optional<tvm::runtime::Tensor> target);
void CopyToHost(int64_t key, tvm::ffi::Optional<tvm::runtime::Tensor> source);
tvm::ffi::Function GetGlobalFunc(tvm::ffi::String name);
/*! \brief The same, but what is missing fails when it is called. */
tvm::ffi::Function FindFunction(tvm::ffi::String name);
/*! \brief A list, or none, with more values at its end: arguments of a command that is too long. */
void Append(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*! \brief One str, bytes or Shape, out of a list of its bytes. */
tvm::ffi::Any JoinPieces(tvm::ffi::String kind, tvm::ffi::Array<tvm::ffi::Any> pieces);
void CallWithList(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*! \brief How many threads TVM's kernels may use in the calling worker. */
void SetThreads(int threads);
tvm::ffi::Function GetFunction(tvm::ffi::Module module, tvm::ffi::String name);
void CallIfPresent(tvm::ffi::Module module, tvm::ffi::String name);
/*! \brief An error if the calling worker's session has not so many workers and groups. */
void RequireWorkers(int workers, int groups);

}  // namespace worker

/*! \brief The calling thread's rank, or an error that says how to get one. */
Rank& RequireRank();

}  // namespace tvm_ipc
#endif  // TVM_IPC_SESSION_H_
