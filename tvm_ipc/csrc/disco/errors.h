/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file errors.h
 * \brief The core's errors as TVM's.
 */
#ifndef TVM_IPC_DISCO_ERRORS_H_
#define TVM_IPC_DISCO_ERRORS_H_

#include <tvm/ffi/error.h>

#include "core/error.h"

namespace tvm_ipc {

/*! \brief What the function returns; what it throws is thrown so that Python sees its kind. */
template <typename Function>
auto WithErrors(const Function& function) {
  try {
    return function();
  } catch (const Error& error) {
    throw tvm::ffi::Error(error.kind(), error.what(), "");
  }
}

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_ERRORS_H_
