/* SPDX-License-Identifier: Apache-2.0 */
/*! \file move.cu
 *  \brief The kernels for data movement, barriers, exposed buffers, messages and the memory probe.
 */
#include "cuda/kernels/data_movement_collectives_device_code.h"
#include "cuda/kernels/messages_exposure_probe_device_code.h"

namespace tvm_ipc {
namespace kernels {

TVM_IPC_KERNEL(tvm_ipc_move, MoveArgs, Move)
TVM_IPC_KERNEL(tvm_ipc_move_push, MoveArgs, MovePush)
TVM_IPC_KERNEL(tvm_ipc_barrier, BarrierArgs, MeetTeam)
TVM_IPC_KERNEL(tvm_ipc_expose, ExposeArgs, Expose)
TVM_IPC_KERNEL(tvm_ipc_await, ExposeArgs, Await)
TVM_IPC_KERNEL(tvm_ipc_send, MessageArgs, Send)
TVM_IPC_KERNEL(tvm_ipc_receive, MessageArgs, Receive)
TVM_IPC_KERNEL(tvm_ipc_write_pattern, PatternArgs, WritePattern)
TVM_IPC_KERNEL(tvm_ipc_check_pattern, PatternArgs, CheckPattern)

}  // namespace kernels
}  // namespace tvm_ipc
