/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file per_stream_allocator.h
 * \brief Allocator for a device that several workers of one process share.
 *
 * TVM has one pool of freed blocks for a device. Workers that are threads and share a device have
 * separate streams: kernels of one worker may still use a block that it has freed on the host, so
 * kernels of another worker must not write it yet. This allocator reuses blocks only on the stream
 * that they were allocated for.
 */
#ifndef TVM_IPC_DISCO_PER_STREAM_ALLOCATOR_H_
#define TVM_IPC_DISCO_PER_STREAM_ALLOCATOR_H_

#include <tvm/runtime/device_api.h>

namespace tvm_ipc {

/*!
 * \brief Use this allocator for the device in this process; return false if TVM has already created
 *        its own, which cannot be replaced.
 */
bool KeepBlocksByStream(tvm::Device device);

/*! \brief Return the allocator for a device, called by TVM; null for TVM's own. */
void* FindDeviceAllocator(tvm::Device device, int type);

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_PER_STREAM_ALLOCATOR_H_
