/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file streams.cc
 * \brief TVM's streams, for the core: those on which a thread's programs run.
 */
#include "core/streams.h"

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/reflection/registry.h>

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
