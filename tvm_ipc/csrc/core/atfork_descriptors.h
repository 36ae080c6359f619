/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file atfork_descriptors.h
 * \brief Descriptors that child processes of a controller or a worker must not inherit.
 *
 * A forked child gets a copy of every descriptor. If it read its parent's commands, wrote to its
 * parent's session server, or merely held a connection open, it would steal messages, forge them,
 * or hide its parent's death. So in a child every registered descriptor is replaced by /dev/null.
 * It is not closed, because its owner in the child still has the number.
 */
#ifndef TVM_IPC_CORE_ATFORK_DESCRIPTORS_H_
#define TVM_IPC_CORE_ATFORK_DESCRIPTORS_H_

#include <cstdint>

namespace tvm_ipc {

/*! \brief Register a descriptor to be replaced by /dev/null in forked children. */
void KeepFromChildren(int descriptor);
/*! \brief Close a descriptor, registered or not. */
void CloseKept(int descriptor);

/*! \brief Return how many forks this process descends from; a forked child has another number. */
uint32_t Generation();

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_ATFORK_DESCRIPTORS_H_
