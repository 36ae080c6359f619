/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file worker_session_functions.h
 * \brief The worker's functions: they join a session, run commands, report errors and move values.
 *        The controller's side is in controller_session_functions.h.
 */
#ifndef TVM_IPC_DISCO_WORKER_SESSION_FUNCTIONS_H_
#define TVM_IPC_DISCO_WORKER_SESSION_FUNCTIONS_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/rank_runtime_state.h"

namespace tvm_ipc {

namespace worker {

/*! \brief Let the calling worker join a session. `find` looks up the fallback backend by name. */
void InitCCLPerWorker(const Backend& backend, const Backend& (*find)(const std::string& name),
                      tvm::ffi::Shape device_ids, tvm::ffi::Bytes invitation);
/*! \brief Return the invitation that the calling worker joined with; empty if it is no worker. */
const std::string& OwnInvitation();
/*! \brief Mark this process as a worker, and keep its pipes from child processes. */
void ServeParent(int64_t read_fd, int64_t write_fd);
/*! \brief Run a command, and report its error; do nothing if the rank has failed before. */
void Guard(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*! \brief Call a function; report its error to the controller and abort the session. Return whether
 *         it succeeded. */
bool ReportErrors(Rank& rank, const std::function<void()>& function);
/*! \brief Acknowledge a ticket, once everything before it is done. */
void Done(int64_t ticket);
void Fetch(tvm::ffi::Any value, int rank, int64_t key);
/*!
 * \brief Like Fetch, but for a CPU tensor of more than `most` bytes send only a description: a list
 *        of a marker text, its shape and its type. The controller then copies it with CopyToHost.
 */
void FetchLimited(tvm::ffi::Any value, int rank, int64_t key, int64_t most);
/*! \brief Return a tensor on the device of the calling worker that has these bytes. */
tvm::runtime::Tensor TensorOfBytes(tvm::ffi::Bytes bytes, tvm::ffi::Shape shape, DLDataType dtype);
/*! \brief Return the controller's value in worker 0, and `otherwise` in other workers. */
tvm::ffi::Any TakeFromHost(int64_t key, tvm::ffi::Any otherwise);
void CopyFromHost(int64_t key, int receiver, tvm::ffi::Optional<tvm::runtime::Tensor> target);
void CopyToHost(int64_t key, tvm::ffi::Optional<tvm::runtime::Tensor> source);
tvm::ffi::Function GetGlobalFunc(tvm::ffi::String name);
/*! \brief Return a global function; a missing function fails only when it is called. */
tvm::ffi::Function FindFunction(tvm::ffi::String name);
/*! \brief Append values to a list, which may be None: arguments of a command that is too long. */
void Append(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*! \brief Build a str, bytes or Shape from a list of chunks of its bytes. */
tvm::ffi::Any ConcatChunks(tvm::ffi::String kind, tvm::ffi::Array<tvm::ffi::Any> pieces);
/*! \brief Call a function with the values of a list. */
tvm::ffi::Any CallWithList(tvm::ffi::Function function, tvm::ffi::Array<tvm::ffi::Any> values);
/*! \brief Return the id of the team of these ranks (core/teams.h). */
int TeamOfRanks(tvm::ffi::Shape ranks, int64_t copy);
/*! \brief Return the rank that the calling thread acts for. */
int RankOfThread();
/*! \brief Return the device of that rank's tensors. */
tvm::Device DeviceOfThread();
/*! \brief Call a function if this rank is a member of a team. */
void CallInTeam(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*!
 * \brief Allocate the result of a collective, whose shape follows from the input.
 *
 * Parts are concatenated along the first axis, and a reduce-scatter splits that axis. The result of
 * an all-to-all with unequal parts has one axis.
 * \param parts The numbers of elements of an all-to-all with unequal parts; otherwise empty.
 * \param root The only team index that gets a result; -1 if all members do.
 * \return An uninitialised tensor, or nothing where there is no result.
 */
tvm::ffi::Optional<tvm::runtime::Tensor> EmptyResult(
    tvm::ffi::String collective, tvm::ffi::Optional<tvm::runtime::Tensor> source,
    tvm::ffi::Shape parts, int64_t root, int64_t team);
/*!
 * \brief Return a function with which other threads begin to act for the calling thread's rank
 *        (true) or stop (false).
 */
tvm::ffi::Function ShareRank();
/*! \brief Delay everything that the rank receives as a slower link would (core/emulated_link.h). */
void EmulateLink(double latency, double bandwidth, double jitter);
/*! \brief Set how many threads TVM's kernels may use in the calling worker. */
void SetThreads(int threads);
tvm::ffi::Function GetFunction(tvm::ffi::Module module, tvm::ffi::String name);
void CallIfPresent(tvm::ffi::Module module, tvm::ffi::String name);
/*! \brief Throw unless the calling worker's session has this many workers and groups. */
void RequireWorkers(int workers, int groups);

}  // namespace worker

/*! \brief Convert the ranks of a team, and the number of its copy, from a program's arguments. */
std::vector<int> TeamMembers(const tvm::ffi::Shape& ranks);
uint32_t TeamCopy(int64_t copy);

/*! \brief Return the calling thread's rank; throw if it has none. */
Rank& RequireRank();

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_WORKER_SESSION_FUNCTIONS_H_
