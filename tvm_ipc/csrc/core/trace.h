/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file trace.h
 * \brief What a rank does in a step, told to a test that compares it with the model of the
 *        protocol (tests/model). Nothing in the library.
 */
#ifndef TVM_IPC_CORE_TRACE_H_
#define TVM_IPC_CORE_TRACE_H_

#include <cstdint>

namespace tvm_ipc {

#ifdef TVM_IPC_TRACE
/*! \brief Defined by the test. `rank` is whose memory it is, `slot` which of two, if that matters.
 */
void Trace(const char* what, int rank, uint32_t slot);
#else
inline void Trace(const char*, int, uint32_t) {}
#endif

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_TRACE_H_
