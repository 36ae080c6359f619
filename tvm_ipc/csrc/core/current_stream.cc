/* SPDX-License-Identifier: Apache-2.0 */
/*! \file current_stream.cc */
#include "core/current_stream.h"

namespace tvm_ipc {

Streams& ProgramStreams() {
  thread_local void* current = nullptr;
  static Streams streams = {[](int32_t, int32_t) { return current; },
                            [](int32_t, int32_t, void* stream) { current = stream; }};
  return streams;
}

}  // namespace tvm_ipc
