/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file library.cc
 * \brief Loads OpenBLAS and looks up its functions.
 */
#include "blas/library.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

#include "core/error.h"

namespace tvm_ipc {
namespace {

std::mutex loading;
std::atomic<const BlasLibrary*> loaded{nullptr};  // never freed: threads may be using it

template <typename Function>
Function Find(void* library, const std::string& path, const std::string& name) {
  // SciPy's wheels add a prefix to each name, and a suffix for 64-bit integers.
  const std::string symbol = "scipy_" + name + "64_";
  void* address = dlsym(library, symbol.c_str());
  if (address == nullptr) {
    Fail(kind::kRuntime, path, " has no function ", symbol,
         "; it must be the library of the wheel scipy-openblas64");
  }
  return reinterpret_cast<Function>(address);
}

}  // namespace

const BlasLibrary* LoadedBlas() { return loaded.load(std::memory_order_acquire); }

const BlasLibrary& LoadBlas(const std::string& path) {
  std::lock_guard<std::mutex> lock(loading);
  if (const BlasLibrary* library = LoadedBlas()) return *library;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) Fail(kind::kRuntime, "OpenBLAS cannot be loaded: ", dlerror());
  BlasLibrary found;
  found.sgemm = Find<BlasLibrary::Gemm<float>>(handle, path, "cblas_sgemm");
  found.dgemm = Find<BlasLibrary::Gemm<double>>(handle, path, "cblas_dgemm");
  found.dgemv = Find<BlasLibrary::Gemv<double>>(handle, path, "cblas_dgemv");
  found.config = Find<const char* (*)()>(handle, path, "openblas_get_config")();
  Find<void (*)(int)>(handle, path, "openblas_set_num_threads")(1);
  const BlasLibrary* library = new BlasLibrary(std::move(found));
  loaded.store(library, std::memory_order_release);
  return *library;
}

}  // namespace tvm_ipc
