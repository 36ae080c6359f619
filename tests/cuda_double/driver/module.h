// SPDX-License-Identifier: Apache-2.0
// Modules: libraries for the CPU with kernels in them.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_MODULE_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_MODULE_H_

#include <map>
#include <memory>
#include <string>

#include "../kernel_abi.h"
#include "context.h"
#include "handles.h"

namespace cuda_double {

struct Function {
  std::string name;
  const CpuKernel* kernel = nullptr;
  Context* context = nullptr;
  int dynamic_shared = 0;  // what cuFuncSetAttribute allows, 0: the usual
  std::weak_ptr<struct Module> module;
};

struct Module {
  void* library = nullptr;
  int fd = -1;  // of its file, where it has one of its own
  Context* context = nullptr;
  std::string image;  // a cubin or PTX whose kernels `library` stands for; empty otherwise
  std::map<std::string, Handle> functions;
  ~Module();
};

Handles<Module>& Modules();
Handles<Function>& Functions();

}  // namespace cuda_double

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_MODULE_H_
