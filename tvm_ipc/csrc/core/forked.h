/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file forked.h
 * \brief What a process that is forked off a controller or a worker must not have of its parent.
 *
 * A child gets a copy of every descriptor. One that read its parent's commands, wrote to its
 * parent's hub, or merely held a connection open would take messages away, invent them, or hide
 * its parent's death. So in a child every descriptor that was given here leads nowhere: it is
 * replaced, not closed, for what owns it still has its number.
 */
#ifndef TVM_IPC_CORE_FORKED_H_
#define TVM_IPC_CORE_FORKED_H_

#include <cstdint>

namespace tvm_ipc {

/*! \brief Replace the descriptor by /dev/null in processes that are forked from now on. */
void KeepFromChildren(int descriptor);
/*! \brief Close a descriptor, of which `KeepFromChildren` may know or not. */
void CloseKept(int descriptor);

/*! \brief How often the process was forked before it became what it is: a copy has another count.
 */
uint32_t Generation();

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_FORKED_H_
