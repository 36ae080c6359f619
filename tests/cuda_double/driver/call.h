// SPDX-License-Identifier: Apache-2.0
// Each function of the API is one Call: counted, made to fail where a test asks for it, checked for
// what all functions need, and its failures turned into codes.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_CALL_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_CALL_H_

#include <string>

#include "context.h"
#include "errors.h"

#define CUDA_DOUBLE_API extern "C" __attribute__((visibility("default")))

namespace cuda_double {

// What a function needs. kContext: a current context that is not broken by an earlier fault.
// kUnsafe: the same, and that no capture forbids it.
enum class Needs { kNothing, kInit, kContext, kUnsafe };

// Throws what TVM_IPC_DOUBLE_FAIL wants of this call. The runtime's functions ask it too.
void CountCall(const char* name);

// Throws if the calling thread may not make such calls; gives the current context where one is
// needed.
Context* CheckCall(Needs needs);

int EndCall(const char* name, const Failure& failure);

template <class F>
int Call(const char* name, Needs needs, F&& body) {
  try {
    CountCall(name);
    Context* context = CheckCall(needs);
    if constexpr (std::is_invocable_v<F, Context&>) {
      body(*context);
    } else {
      body();
    }
    return kSuccess;
  } catch (const Failure& failure) {
    return EndCall(name, failure);
  }
}

// What a real driver would not notice, but is wrong: said at exit.
void NoteViolation(const std::string& text);

extern thread_local bool in_host_function;

}  // namespace cuda_double

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_CALL_H_
