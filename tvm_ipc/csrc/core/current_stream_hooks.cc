/* SPDX-License-Identifier: Apache-2.0 */
/*! \file current_stream_hooks.cc */
#include "core/current_stream_hooks.h"

namespace tvm_ipc {

Streams& ProgramStreams() {
  thread_local void* current = nullptr;
  static Streams streams = {[](int32_t, int32_t) { return current; },
                            [](int32_t, int32_t, void* stream) { current = stream; }};
  return streams;
}

}  // namespace tvm_ipc
