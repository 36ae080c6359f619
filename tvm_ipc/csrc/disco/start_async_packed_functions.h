/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file start_async_packed_functions.h
 * \brief Asynchronous operations of programs: packed functions that run in the background.
 */
#ifndef TVM_IPC_DISCO_START_ASYNC_PACKED_FUNCTIONS_H_
#define TVM_IPC_DISCO_START_ASYNC_PACKED_FUNCTIONS_H_

#include <tvm/ffi/function.h>
#include <tvm/ffi/object.h>

#include <string>

namespace tvm_ipc {

/*! \brief Let programs start a global function, which may use only the rank of its thread. */
void MakeStartable(const std::string& name);
/*! \brief Start the function with this name, with the arguments after it; return the request. */
void Start(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*! \brief Wait until a request has ended; throw if it failed. */
void Wait(tvm::ffi::Any request);

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_START_ASYNC_PACKED_FUNCTIONS_H_
