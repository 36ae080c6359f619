/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file storage.h
 * \brief Arena memory as TVM storages, which `vm.builtin.alloc_tensor` takes.
 */
#ifndef TVM_IPC_DISCO_STORAGE_H_
#define TVM_IPC_DISCO_STORAGE_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/memory/memory_manager.h>

namespace tvm_ipc {

/*! \brief Allocate a storage for shape x dtype in the calling worker's arena. */
tvm::runtime::memory::Storage AllocStorage(tvm::ffi::Shape shape, DLDataType dtype);
/*! \brief Return a tensor in a storage at an offset in bytes, with an adjusted data pointer. */
tvm::ffi::Tensor AllocTensor(tvm::runtime::memory::Storage storage, int64_t offset,
                             tvm::ffi::Shape shape, DLDataType dtype);
/*! \brief Return a view of a tensor from a byte offset, with an adjusted data pointer.
 */
tvm::ffi::Tensor ViewTensor(tvm::ffi::Tensor tensor, int64_t offset, tvm::ffi::Shape shape);
/*! \brief Like ViewTensor, with the function's name for errors. */
tvm::ffi::Tensor ViewFor(const char* function, tvm::ffi::Tensor tensor, int64_t offset,
                         tvm::ffi::Shape shape);
/*! \brief Throw if a value is outside the bounds that a memory plan relies on. */
void RequireBounds(tvm::ffi::String what, int64_t value, int64_t least, int64_t most);
/*! \brief Copy between two tensors of the same type and size, on any devices. */
void CopyTensor(tvm::ffi::Tensor source, tvm::ffi::Tensor target);
/*! \brief Return unused pages to the system. */
void ClearArena();
/*! \brief Return the statistics of the arena as JSON. */
tvm::ffi::String ArenaStatistics();
/*! \brief Return the offset of a tensor's data in the arena; -1 if it is elsewhere. */
int64_t ArenaOffset(tvm::ffi::Tensor tensor);
/*! \brief Return the number of bytes that the caller's collectives have received from others. */
int64_t BytesReceived();

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_STORAGE_H_
