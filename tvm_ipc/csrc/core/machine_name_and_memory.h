/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file machine_name_and_memory.h
 * \brief The name and the memory of this machine.
 */
#ifndef TVM_IPC_CORE_MACHINE_NAME_AND_MEMORY_H_
#define TVM_IPC_CORE_MACHINE_NAME_AND_MEMORY_H_

#include <cstddef>
#include <string>

namespace tvm_ipc {

/*! \brief Return the boot id and the host name. */
std::string ThisMachine();
/*! \brief Return the memory of the machine or, if less, of the container, in bytes. */
size_t PhysicalMemory();
/*! \brief Return half of that memory, split among the ranks. */
size_t DefaultArenaBytes(int num_ranks);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_MACHINE_NAME_AND_MEMORY_H_
