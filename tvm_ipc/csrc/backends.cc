/* SPDX-License-Identifier: Apache-2.0 */
/*! \file backends.cc */
#include "backends.h"

#include "core/error.h"
#include "cuda/backend_factory.h"
#include "mpi/endpoint_and_backend.h"
#include "nccl/endpoint_and_backend.h"
#include "shm/endpoint_and_backend.h"

namespace tvm_ipc {

const std::vector<const Backend*>& Backends() {
  static const std::vector<const Backend*> backends = {
      &SharedMemory(),
      &Mpi(),
      &Cuda(),
      &Nccl(),
  };
  return backends;
}

const Backend& FindBackend(const std::string& name) {
  std::string known = "auto";
  for (const Backend* backend : Backends()) {
    if (name == "auto" || name == backend->name()) return *backend;
    known += Text(", ", backend->name());
  }
  Fail(kind::kValue, "there is no backend ", name, "; there are: ", known);
}

const Backend& BackendOfMachine() {
  const int32_t cpu = Backends().front()->capabilities().device_type;
  for (const Backend* backend : Backends()) {
    if (backend->capabilities().device_type != cpu && backend->Refusal({0}).empty()) {
      return *backend;
    }
  }
  return *Backends().front();
}

}  // namespace tvm_ipc
