/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file worker_pipes.h
 * \brief The pipes to the worker processes of a session, which Disco gets by the key of their pool.
 *
 * Disco closes them in a destructor, where an error ends the program. A Python function may raise
 * one at any line: KeyboardInterrupt, or because modules are empty at interpreter shutdown. So the
 * function that Disco calls is native, and owns the descriptors. For Disco's own sessions it is a
 * Python function, which also ends processes; RetryInDestructor wraps it.
 */
#ifndef TVM_IPC_DISCO_WORKER_PIPES_H_
#define TVM_IPC_DISCO_WORKER_PIPES_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <string>

namespace tvm_ipc {

/*!
 * \brief Own the pipes of a pool.
 * \param null_device Opened in advance: the process may be out of descriptors later.
 * \param descriptors For each of the workers 1 to n, the descriptor to read from it and that to
 *        write to it, which may be the same.
 */
void OfferPipes(std::string key, int64_t null_device, tvm::ffi::Shape descriptors);

/*! \brief Return the function that Disco calls with the number of a worker for its descriptors, and
 *         with 0 to close all of them. */
tvm::ffi::Function CreateProcessPool(int64_t num_workers, int64_t num_groups, std::string key);

// ---- These do nothing, and return false, once the pipes are closed. ----

/*! \brief Return whether the other end of a pipe is closed, unless MutePipes has been called. The
 *         system reports this as soon as a write fails, and before the exit code of a process. */
bool PipesHungUp(std::string key);
/*! \brief Disconnect, and redirect later writes to the null device: those to a dead worker fail. */
void MutePipes(std::string key);
/*! \brief Close the pipes; return whether they were open. */
bool ClosePipes(std::string key);

/*!
 * \brief Return a function that Disco can call in a destructor in place of `pool`, in Python.
 *
 * If `pool` raises an error when it ends the workers, it is called again, and must go on where it
 * was. After a KeyboardInterrupt, SIGINT is raised again.
 */
tvm::ffi::Function RetryInDestructor(tvm::ffi::Function pool);

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_WORKER_PIPES_H_
