/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file constants_repeated_in_python.h
 * \brief The constants that `tvm_ipc/packed_functions/constants_shared_with_native_library.py`
 * repeats in Python.
 */
#ifndef TVM_IPC_CONSTANTS_REPEATED_IN_PYTHON_H_
#define TVM_IPC_CONSTANTS_REPEATED_IN_PYTHON_H_

#include <tvm/ffi/string.h>

namespace tvm_ipc {

/*! \brief Return the library's limits, numbers and names as JSON, by their names in Python. A test
 *         compares them. */
tvm::ffi::String Numbers();

}  // namespace tvm_ipc
#endif  // TVM_IPC_CONSTANTS_REPEATED_IN_PYTHON_H_
