/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file worker_pipes.h
 * \brief Pipes to worker processes that can be written to when the worker is no more.
 *
 * Disco writes to its workers in destructors too, where the error of a pipe without a reader ends
 * the program. So the reading end of each pipe stays open in the controller, and a thread watches
 * the workers: once one has ended, its pipe's writing end leads nowhere, and what was written
 * before is taken out, lest a writer wait for room.
 */
#ifndef TVM_IPC_CORE_WORKER_PIPES_H_
#define TVM_IPC_CORE_WORKER_PIPES_H_

namespace tvm_ipc {

/*!
 * \brief Watch a worker and its pipe.
 * \param pid A child of this process; others may wait for it too.
 * \param reading_end Closed here when the worker has ended and nobody writes any more.
 * \param writing_end The caller's.
 */
void WatchPipe(int pid, int reading_end, int writing_end);
/*! \brief No longer watch the pipe with this writing end, and close both ends. */
void ClosePipe(int writing_end);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_WORKER_PIPES_H_
