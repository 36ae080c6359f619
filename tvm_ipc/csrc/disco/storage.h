/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file storage.h
 * \brief The arena as TVM sees it: a storage that `vm.builtin.alloc_tensor` takes.
 */
#ifndef TVM_IPC_DISCO_STORAGE_H_
#define TVM_IPC_DISCO_STORAGE_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/memory/memory_manager.h>

namespace tvm_ipc {

/*! \brief Room for shape x dtype in the calling worker's arena. */
tvm::runtime::memory::Storage AllocStorage(tvm::ffi::Shape shape, DLDataType dtype);
/*! \brief A tensor in a storage, from an offset in bytes; its data pointer is moved there. */
tvm::ffi::Tensor AllocTensor(tvm::runtime::memory::Storage storage, int64_t offset,
                             tvm::ffi::Shape shape, DLDataType dtype);
/*! \brief A tensor of this shape inside of another one, from a byte on; its data pointer is moved.
 */
tvm::ffi::Tensor ViewTensor(tvm::ffi::Tensor tensor, int64_t offset, tvm::ffi::Shape shape);
/*! \brief The same for a function whose name errors have. */
tvm::ffi::Tensor ViewFor(const char* function, tvm::ffi::Tensor tensor, int64_t offset,
                         tvm::ffi::Shape shape);
/*! \brief Fail where a value is not in the bounds that a memory plan relies on. */
void RequireBounds(tvm::ffi::String what, int64_t value, int64_t least, int64_t most);
/*! \brief Copy between two tensors of one type and size, wherever they lie. */
void CopyTensor(tvm::ffi::Tensor source, tvm::ffi::Tensor target);
/*! \brief Give unused pages back to the system. */
void ClearArena();
/*! \brief JSON. */
tvm::ffi::String ArenaStatistics();
/*! \brief Where a tensor's data lies in the arena, or -1. */
int64_t ArenaOffset(tvm::ffi::Tensor tensor);

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_STORAGE_H_
