/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file numbers.h
 * \brief What `tvm_ipc/contract/values.py` says too.
 */
#ifndef TVM_IPC_NUMBERS_H_
#define TVM_IPC_NUMBERS_H_

#include <tvm/ffi/string.h>

namespace tvm_ipc {

/*! \brief JSON: limits, numbers and names of the library by their names in Python, for a test. */
tvm::ffi::String Numbers();

}  // namespace tvm_ipc
#endif  // TVM_IPC_NUMBERS_H_
