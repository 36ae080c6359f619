/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file posting.h
 * \brief Works of programs: packed functions that are called beside what it does.
 */
#ifndef TVM_IPC_DISCO_POSTING_H_
#define TVM_IPC_DISCO_POSTING_H_

#include <tvm/ffi/function.h>
#include <tvm/ffi/object.h>

#include <string>

namespace tvm_ipc {

/*! \brief Let programs post a global function, which needs no more than the rank of its thread. */
void MakePostable(const std::string& name);
/*! \brief Post the function with this name, with the arguments after it. Returns the work. */
void Post(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*! \brief Returns when a work has ended, with an error if that was one. */
void Wait(tvm::ffi::Any work);

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_POSTING_H_
