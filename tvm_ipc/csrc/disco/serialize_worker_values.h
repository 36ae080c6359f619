/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file serialize_worker_values.h
 * \brief Serializes values that a worker process sends to the controller.
 */
#ifndef TVM_IPC_DISCO_SERIALIZE_WORKER_VALUES_H_
#define TVM_IPC_DISCO_SERIALIZE_WORKER_VALUES_H_

#include <tvm/ffi/any.h>

#include <string>

namespace tvm_ipc {

/*! \brief Serialize None, numbers, strings, bytes, shapes, dtypes, devices, tensors, and arrays of
 *         them; other objects become TVM's JSON graph. The result is never empty. */
std::string PackValue(const tvm::ffi::Any& value);
tvm::ffi::Any UnpackValue(const std::string& bytes);

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_SERIALIZE_WORKER_VALUES_H_
