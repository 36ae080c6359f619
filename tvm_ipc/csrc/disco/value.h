/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file value.h
 * \brief Values as bytes, on their way from a worker process to the controller.
 */
#ifndef TVM_IPC_DISCO_VALUE_H_
#define TVM_IPC_DISCO_VALUE_H_

#include <tvm/ffi/any.h>

#include <string>

namespace tvm_ipc {

/*! \brief None, numbers, strings, bytes, shapes, dtypes, devices, tensors, arrays of them; other
 *         objects as TVM's JSON graph. Never empty. */
std::string PackValue(const tvm::ffi::Any& value);
tvm::ffi::Any UnpackValue(const std::string& bytes);

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_VALUE_H_
