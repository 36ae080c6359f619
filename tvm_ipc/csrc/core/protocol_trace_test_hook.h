/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file protocol_trace_test_hook.h
 * \brief Trace points in the steps of a rank, for a test that compares them with the model of the
 *        protocol (tests/model). They are empty in the library.
 */
#ifndef TVM_IPC_CORE_PROTOCOL_TRACE_TEST_HOOK_H_
#define TVM_IPC_CORE_PROTOCOL_TRACE_TEST_HOOK_H_

#include <cstdint>

namespace tvm_ipc {

#ifdef TVM_IPC_TRACE
/*! \brief Defined by the test. `rank` owns the memory; `slot` is one of two, if that matters. */
void Trace(const char* what, int rank, uint32_t slot);
#else
inline void Trace(const char*, int, uint32_t) {}
#endif

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_PROTOCOL_TRACE_TEST_HOOK_H_
