/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file tvm/support/serializer.h
 * \brief Stands in for a header that the apache-tvm wheel does not carry; see io.h beside it.
 */
#ifndef TVM_IPC_SHIM_TVM_SUPPORT_SERIALIZER_H_
#define TVM_IPC_SHIM_TVM_SUPPORT_SERIALIZER_H_
#include <tvm/support/io.h>
#endif  // TVM_IPC_SHIM_TVM_SUPPORT_SERIALIZER_H_
