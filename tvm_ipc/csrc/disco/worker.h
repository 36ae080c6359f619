/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file worker.h
 * \brief What a worker does for its session: it joins, runs commands and reports their errors, and
 *        moves values. The controller's side is in session.h.
 */
#ifndef TVM_IPC_DISCO_WORKER_H_
#define TVM_IPC_DISCO_WORKER_H_

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

#include "core/group.h"

namespace tvm_ipc {

namespace worker {

/*! \param find A backend by its name, for sessions that go on with another one. */
void InitCCLPerWorker(const Backend& backend, const Backend& (*find)(const std::string& name),
                      tvm::ffi::Shape device_ids, tvm::ffi::Bytes invitation);
/*! \brief The invitation that made the calling thread a worker; empty if it is none. */
const std::string& OwnInvitation();
/*! \brief Mark this process as a worker, and keep its pipes to itself. */
void ServeParent(int64_t read_fd, int64_t write_fd);
void Guard(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*! \brief Call a function; what it throws goes to the controller, and ends what peers wait for. */
bool ReportErrors(Rank& rank, const std::function<void()>& function);
void Done(int64_t ticket);
void Fetch(tvm::ffi::Any value, int rank, int64_t key);
/*!
 * \brief Like Fetch, but of a tensor of the CPU of more than `most` bytes a list is sent of a text,
 *        its shape and its type: worker 0 then gets it into memory of the controller.
 */
void FetchLimited(tvm::ffi::Any value, int rank, int64_t key, int64_t most);
/*! \brief The controller's value, in worker 0; in others another one. */
tvm::ffi::Any TakeFromHost(int64_t key, tvm::ffi::Any otherwise);
void CopyFromHost(int64_t key, int receiver, tvm::ffi::Optional<tvm::runtime::Tensor> target);
void CopyToHost(int64_t key, tvm::ffi::Optional<tvm::runtime::Tensor> source);
tvm::ffi::Function GetGlobalFunc(tvm::ffi::String name);
/*! \brief The same, but what is missing fails when it is called. */
tvm::ffi::Function FindFunction(tvm::ffi::String name);
/*! \brief A list, or none, with more values at its end: arguments of a command that is too long. */
void Append(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*! \brief One str, bytes or Shape, out of a list of its bytes. */
tvm::ffi::Any JoinPieces(tvm::ffi::String kind, tvm::ffi::Array<tvm::ffi::Any> pieces);
/*! \brief Call a function with the values of a list. */
tvm::ffi::Any CallWithList(tvm::ffi::Function function, tvm::ffi::Array<tvm::ffi::Any> values);
/*! \brief The id of the team of these ranks: see core/teams.h. */
int TeamOfRanks(tvm::ffi::Shape ranks, int64_t copy);
/*! \brief The rank that the calling thread acts for. */
int RankOfThread();
/*! \brief What that rank computes on, where its tensors are. */
tvm::Device DeviceOfThread();
/*! \brief Call a function in the members of a team, and nothing in others. */
void CallInTeam(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*!
 * \brief A function by which other threads act for the calling thread's rank (true), and stop it
 *        (false).
 */
tvm::ffi::Function ShareRank();
/*! \brief From now on what the rank receives comes as late as over a link: core/link.h. */
void EmulateLink(double latency, double bandwidth, double jitter);
/*! \brief How many threads TVM's kernels may use in the calling worker. */
void SetThreads(int threads);
tvm::ffi::Function GetFunction(tvm::ffi::Module module, tvm::ffi::String name);
void CallIfPresent(tvm::ffi::Module module, tvm::ffi::String name);
/*! \brief An error if the calling worker's session has not so many workers and groups. */
void RequireWorkers(int workers, int groups);

}  // namespace worker

/*! \brief The ranks of a team, and the number of its copy, as callers give them. */
std::vector<int> TeamMembers(const tvm::ffi::Shape& ranks);
uint32_t TeamCopy(int64_t copy);

/*! \brief The calling thread's rank, or an error that says how to get one. */
Rank& RequireRank();

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_WORKER_H_
