/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file ffi_env_stream.cc
 * \brief Gives the core TVM's streams, on which a thread's programs run.
 */
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/reflection/registry.h>

#include "core/current_stream_hooks.h"
#include "core/error.h"

namespace tvm_ipc {

TVM_FFI_STATIC_INIT_BLOCK() {
  ProgramStreams() = {
      [](int32_t type, int32_t device) -> void* { return TVMFFIEnvGetStream(type, device); },
      [](int32_t type, int32_t device, void* stream) {
        if (TVMFFIEnvSetStream(type, device, stream, nullptr) == 0) return;
        Fail(kind::kRuntime, "TVM does not take a stream of device ", device, " of type ", type);
      }};
}

}  // namespace tvm_ipc
