/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file dynamic_library.h
 * \brief A library that is loaded at run time, and the lookup of its functions.
 */
#ifndef TVM_IPC_CORE_DYNAMIC_LIBRARY_H_
#define TVM_IPC_CORE_DYNAMIC_LIBRARY_H_

#include <dlfcn.h>

#include <string>

namespace tvm_ipc {

/*!
 * \brief A loaded library. It is never closed: it may have threads of its own, and functions that
 *        run at process exit.
 */
class DynamicLibrary {
 public:
  explicit DynamicLibrary(const std::string& path, int mode = RTLD_NOW | RTLD_LOCAL)
      : handle_(dlopen(path.c_str(), mode)) {
    if (handle_ != nullptr) return;
    const char* error = dlerror();
    error_ = error == nullptr ? path : error;
  }

  /*! \brief Return why it was not loaded; empty if it was. */
  const std::string& error() const { return error_; }
  /*! \brief Set a function pointer, to null if the library lacks the function. Return whether it
   *         has it. */
  template <typename Pointer>
  bool Find(const char* name, Pointer* function) const {
    *function = reinterpret_cast<Pointer>(dlsym(handle_, name));
    return *function != nullptr;
  }

 private:
  void* handle_;
  std::string error_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_DYNAMIC_LIBRARY_H_
