/* SPDX-License-Identifier: Apache-2.0 */
/*! \file mpi_library.cc */
#include "engine/mpi_library.h"

#include "core/dynamic_library.h"
#include "core/error.h"

namespace tvm_ipc::engine {

MpiFunctions FindMpi(const std::string& path) {
  const DynamicLibrary library(path, RTLD_LAZY | RTLD_NOLOAD);
  if (!library.error().empty()) {
    Fail(kind::kRuntime, "this process has not loaded ", path,
         ", which is to have MPI's functions");
  }
  MpiFunctions found;
  auto take = [&](auto* function, const char* name) {
    if (library.Find(name, function)) return;
    Fail(kind::kRuntime, path, " and what it needs have no function ", name,
         "; needed is an MPI of version 3 or newer, such as that of the extra `mpi` of tvm-ipc");
  };
#define TVM_IPC_TAKE(name, ...) take(&found.name, "MPI_" #name);
  TVM_IPC_MPI_FUNCTIONS(TVM_IPC_TAKE)
#undef TVM_IPC_TAKE
  return found;
}

}  // namespace tvm_ipc::engine
