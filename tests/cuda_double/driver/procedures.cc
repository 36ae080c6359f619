// SPDX-License-Identifier: Apache-2.0
// cuGetProcAddress: the newest version of a function by its plain name.
#include <dlfcn.h>

#include <string>

#include "call.h"

using namespace cuda_double;

CUDA_DOUBLE_API int cuGetProcAddress_v2(const char* name, void** address, int, uint64_t,
                                        int* status) {
  return Call("cuGetProcAddress", Needs::kNothing, [&] {
    static void* self = [] {
      Dl_info info{};
      dladdr(reinterpret_cast<void*>(&cuGetProcAddress_v2), &info);
      return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    *address = nullptr;
    for (const char* version : {"_v3", "_v2", ""}) {
      if (*address == nullptr) *address = dlsym(self, (std::string(name) + version).c_str());
    }
    if (status != nullptr) *status = *address != nullptr ? 0 : 1;
    Require(*address != nullptr, kNotFound, "no such function");
  });
}
