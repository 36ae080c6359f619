/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file library.cc
 * \brief Loads OpenBLAS and looks up its functions.
 */
#include "blas/library.h"

#include <atomic>
#include <mutex>

#include "core/dynamic_library.h"
#include "core/error.h"

namespace tvm_ipc {
namespace {

std::mutex loading;
std::atomic<const BlasLibrary*> loaded{nullptr};  // never freed: threads may be using it

}  // namespace

const BlasLibrary* LoadedBlas() { return loaded.load(std::memory_order_acquire); }

const BlasLibrary& LoadBlas(const std::string& path) {
  std::lock_guard<std::mutex> lock(loading);
  if (const BlasLibrary* library = LoadedBlas()) return *library;
  const DynamicLibrary file(path);
  if (!file.error().empty()) Fail(kind::kRuntime, "OpenBLAS cannot be loaded: ", file.error());
  // SciPy's wheels add a prefix to each name, and a suffix for 64-bit integers.
  auto find = [&](const char* name, auto* function) {
    if (file.Find(name, function)) return;
    Fail(kind::kRuntime, path, " has no function ", name,
         "; it must be the library of the wheel scipy-openblas64");
  };
  BlasLibrary found;
  const char* (*get_config)();
  void (*set_num_threads)(int);
  find("scipy_cblas_sgemm64_", &found.sgemm);
  find("scipy_cblas_dgemm64_", &found.dgemm);
  find("scipy_cblas_dgemv64_", &found.dgemv);
  find("scipy_openblas_get_config64_", &get_config);
  find("scipy_openblas_set_num_threads64_", &set_num_threads);
  found.config = get_config();
  set_num_threads(1);
  const BlasLibrary* library = new BlasLibrary(std::move(found));
  loaded.store(library, std::memory_order_release);
  return *library;
}

}  // namespace tvm_ipc
