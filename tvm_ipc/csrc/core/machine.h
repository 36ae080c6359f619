/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file machine.h
 * \brief What this machine is: its name and its memory.
 */
#ifndef TVM_IPC_CORE_MACHINE_H_
#define TVM_IPC_CORE_MACHINE_H_

#include <cstddef>
#include <string>

namespace tvm_ipc {

/*! \brief Boot id and host name. */
std::string ThisMachine();
/*! \brief Memory of the machine or, if it is less, of the container. */
size_t PhysicalMemory();
/*! \brief Half of that memory, divided by the ranks. */
size_t DefaultArenaBytes(int num_ranks);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_MACHINE_H_
