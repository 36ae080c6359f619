/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file error_conversion.h
 * \brief Converts the core's errors to TVM's.
 */
#ifndef TVM_IPC_DISCO_ERROR_CONVERSION_H_
#define TVM_IPC_DISCO_ERROR_CONVERSION_H_

#include <tvm/ffi/error.h>

#include "core/error.h"

namespace tvm_ipc {

/*! \brief Call a function; rethrow the core's errors so that Python sees their kind. */
template <typename Function>
auto WithErrors(const Function& function) {
  try {
    return function();
  } catch (const Error& error) {
    throw tvm::ffi::Error(error.kind(), error.what(), "");
  }
}

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_ERROR_CONVERSION_H_
