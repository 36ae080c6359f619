// SPDX-License-Identifier: Apache-2.0
#include "module.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "call.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

namespace cuda_double {
namespace {

constexpr uint16_t kCudaMachine = 190;
constexpr uint32_t kFatbin = 0xBA55ED50;

void* Open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Failure{kInvalidImage, std::string("a library of kernels: ") + dlerror()};
  }
  return library;
}

// An ELF file says its own length: its section headers are last, or a section is.
size_t ElfBytes(const void* image) {
  auto* bytes = static_cast<const char*>(image);
  Elf64_Ehdr header;
  std::memcpy(&header, bytes, sizeof(header));
  size_t end = header.e_shoff + size_t{header.e_shnum} * header.e_shentsize;
  for (int i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    std::memcpy(&section, bytes + header.e_shoff + size_t{header.e_shentsize} * i, sizeof(section));
    if (section.sh_type != SHT_NOBITS) end = std::max(end, section.sh_offset + section.sh_size);
  }
  for (int i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    std::memcpy(&segment, bytes + header.e_phoff + size_t{header.e_phentsize} * i, sizeof(segment));
    end = std::max(end, segment.p_offset + segment.p_filesz);
  }
  return end;
}

std::string PathOf(int fd) { return "/proc/self/fd/" + std::to_string(fd); }

// A new file each time: two modules have globals of their own. The loader knows libraries by their
// paths, so the descriptor stays open for as long as the library is loaded.
void LoadForCpu(const void* image, size_t bytes, Module* module) {
  module->fd = memfd_create("kernels", MFD_CLOEXEC);
  Require(module->fd >= 0, kOutOfMemory, "a file for the module");
  for (size_t done = 0; done < bytes;) {
    ssize_t written = write(module->fd, static_cast<const char*>(image) + done, bytes - done);
    Require(written > 0, kOutOfMemory, "a file for the module");
    done += static_cast<size_t>(written);
  }
  module->library = Open(PathOf(module->fd));
}

std::shared_ptr<Module> Load(Context& context, const void* image) {
  Require(image != nullptr, kInvalidValue, "no image");
  auto module = std::make_shared<Module>();
  module->context = &context;
  uint32_t first;
  std::memcpy(&first, image, sizeof(first));
  if (std::memcmp(image, ELFMAG, SELFMAG) == 0) {
    auto* header = static_cast<const Elf64_Ehdr*>(image);
    if (header->e_machine == EM_X86_64) {
      LoadForCpu(image, ElfBytes(image), module.get());
      return module;
    }
    Require(header->e_machine == kCudaMachine, kInvalidImage, "an ELF file for another machine");
    module->image.assign(static_cast<const char*>(image), ElfBytes(image));
  } else if (first == kFatbin) {
    uint64_t bytes;  // after magic, version and length of the header
    std::memcpy(&bytes, static_cast<const char*>(image) + 8, sizeof(bytes));
    module->image.assign(static_cast<const char*>(image), 16 + bytes);
  } else {
    auto* text = static_cast<const char*>(image);
    size_t length = strnlen(text, size_t{1} << 20);
    std::string start(text, std::min<size_t>(length, 4096));
    Require(start.find(".version") != std::string::npos, kInvalidImage,
            "neither an ELF file, nor a fatbin, nor PTX");
    module->image = text;
  }
  if (TheSettings().kernels.empty()) {
    throw Failure{kNoBinary, "an image for a GPU, and TVM_IPC_DOUBLE_KERNELS names no library"};
  }
  module->library = Open(TheSettings().kernels);
  return module;
}

}  // namespace

Module::~Module() {
  if (library != nullptr) dlclose(library);
  bool stays = fd >= 0 && dlopen(PathOf(fd).c_str(), RTLD_NOW | RTLD_NOLOAD) != nullptr;
  if (fd >= 0 && !stays) close(fd);
}

Handles<Module>& Modules() {
  static auto* modules = new Handles<Module>(0x30);
  return *modules;
}

Handles<Function>& Functions() {
  static auto* functions = new Handles<Function>(0xF0);
  return *functions;
}

}  // namespace cuda_double

using namespace cuda_double;

CUDA_DOUBLE_API int cuModuleLoadData(Handle* handle, const void* image) {
  return Call("cuModuleLoadData", Needs::kUnsafe, [&](Context& context) {
    WaitForDevices();  // as loading code may
    *handle = Modules().Add(Load(context, image));
  });
}

CUDA_DOUBLE_API int cuModuleLoadDataEx(Handle* handle, const void* image, unsigned int, void*,
                                       void*) {
  return cuModuleLoadData(handle, image);
}

CUDA_DOUBLE_API int cuModuleLoadFatBinary(Handle* handle, const void* image) {
  return cuModuleLoadData(handle, image);
}

CUDA_DOUBLE_API int cuModuleUnload(Handle handle) {
  return Call("cuModuleUnload", Needs::kUnsafe, [&](Context&) {
    std::shared_ptr<Module> module = Modules().Remove(handle);
    WaitForDevices();
    for (auto& [name, function] : module->functions) Functions().Remove(function);
  });
}

CUDA_DOUBLE_API int cuModuleGetFunction(Handle* out, Handle handle, const char* name) {
  return Call("cuModuleGetFunction", Needs::kContext, [&](Context&) {
    std::shared_ptr<Module> module = Modules().Get(handle);
    Require(name != nullptr && out != nullptr, kInvalidValue, "no name");
    auto known = module->functions.find(name);
    if (known != module->functions.end()) {
      *out = known->second;
      return;
    }
    std::string in_image = std::string(name);
    if (!module->image.empty() && module->image.find(in_image) == std::string::npos) {
      throw Failure{kNotFound, "the image has no kernel " + in_image};
    }
    auto* kernel = static_cast<const CpuKernel*>(
        dlsym(module->library, ("tvm_ipc_cpu_kernel_" + in_image).c_str()));
    if (kernel == nullptr) throw Failure{kNotFound, "no kernel " + in_image + " for the CPU"};
    Require(kernel->abi == kCpuKernelAbi, kInvalidImage, "a kernel with another ABI");
    auto function = std::make_shared<Function>();
    function->name = name;
    function->kernel = kernel;
    function->context = module->context;
    function->module = module;
    *out = module->functions[name] = Functions().Add(function);
  });
}

CUDA_DOUBLE_API int cuModuleGetGlobal_v2(Pointer* pointer, size_t* bytes, Handle handle,
                                         const char* name) {
  return Call("cuModuleGetGlobal", Needs::kContext, [&](Context&) {
    void* found = dlsym(Modules().Get(handle)->library, name);
    Require(found != nullptr, kNotFound, "no such global");
    if (pointer != nullptr) *pointer = reinterpret_cast<Pointer>(found);
    if (bytes != nullptr) *bytes = 0;
  });
}
