/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file device_allocator.h
 * \brief Memory of programs on a device that several workers of one process share.
 *
 * TVM has one pool of freed blocks for a device. Workers that are threads and share a device have
 * a stream each there: what one of them frees on the host its kernels may still use, and a kernel
 * of another one may not write it yet. So there blocks go back to the stream that they were for.
 */
#ifndef TVM_IPC_DISCO_DEVICE_ALLOCATOR_H_
#define TVM_IPC_DISCO_DEVICE_ALLOCATOR_H_

#include <tvm/runtime/device_api.h>

namespace tvm_ipc {

/*!
 * \brief From now on programs of this process keep the device's memory by stream; false if TVM
 * keeps it in its own way already, which is for good.
 */
bool KeepBlocksByStream(tvm::Device device);

/*! \brief What TVM asks when it needs an allocator for a device; null where its own is right. */
void* FindDeviceAllocator(tvm::Device device, int type);

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_DEVICE_ALLOCATOR_H_
