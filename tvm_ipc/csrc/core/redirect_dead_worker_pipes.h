/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file redirect_dead_worker_pipes.h
 * \brief Pipes to worker processes that can be written to after the worker has ended.
 *
 * Disco writes to its workers in destructors too, where the error of a pipe without a reader would
 * end the program. So the reading end of each pipe stays open in the controller, and a thread
 * watches the workers. Once one has ended, the thread replaces its pipe's writing end by /dev/null
 * and drains the pipe, so that no writer blocks.
 */
#ifndef TVM_IPC_CORE_REDIRECT_DEAD_WORKER_PIPES_H_
#define TVM_IPC_CORE_REDIRECT_DEAD_WORKER_PIPES_H_

namespace tvm_ipc {

/*!
 * \brief Watch a worker and its pipe, and own the descriptors.
 * \param pid A child of this process; other code may wait for it too.
 * \param reading_end Closed when the worker has ended and all writers are gone, at the latest.
 * \param reply The descriptor to read from the worker.
 */
void WatchPipe(int pid, int reading_end, int writing_end, int reply);
/*! \brief Stop watching the pipe with this writing end, and close its descriptors. For a pipe that
 * is not watched, do nothing. */
void ClosePipe(int writing_end);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_REDIRECT_DEAD_WORKER_PIPES_H_
