/* SPDX-License-Identifier: Apache-2.0 */
/*! \file cuda_driver_api.cc */
#include "driver/cuda_driver_api.h"

#include <string>

#include "core/error.h"

namespace tvm_ipc::cuda {

namespace {

/*! \brief Return what to do about a status, or "" if unknown. */
const char* Hint(Status status) {
  switch (static_cast<int>(status)) {
    case kOutOfMemory:
      return "; a lower arena_limit (TVM_IPC_ARENA_LIMIT) or fewer processes on the device help";
    case kNotInitialised:
      return "; a process that was forked after CUDA had started cannot use it: spawn it instead";
    case kStubLibrary:
      return "; the library that was found is the stub for linking, not the driver: it must not be"
             " in LD_LIBRARY_PATH";
    case kNoDevice:
      return "; CUDA_VISIBLE_DEVICES may hide the devices, or a container was started without them";
    case kNoBinaryForGpu:
    case kInvalidImage:
    case kUnsupportedPtx:
      return "; a newer driver may take the kernels of this library";
    case kOperatingSystem:
      return "; a sandbox may refuse what the driver asks of the system, or descriptors have run"
             " out (RLIMIT_NOFILE)";
    case kSystemNotReady:
      return "; on machines with NVSwitch the fabric manager has to run";
    case kSystemDriverMismatch:
      return "; the kernel module and libcuda.so.1 are of different versions: restart the machine,"
             " or install both again";
    case 214:  // ECC
    case 220:  // NVLink
    case 226:  // contained
      return "; the hardware failed: see nvidia-smi -q and the system's log";
    case 700:  // address
    case 714:  // stack
    case 715:  // instruction
    case 716:  // alignment
    case 717:  // address space
    case 718:  // program counter
    case 719:  // any other crash
      return "; a kernel of the program or of this library has crashed, and this process cannot use"
             " the device any more: end it, and look for the kernel with compute-sanitizer";
    default:
      return "";
  }
}

std::string TextOf(const Driver& driver, Status status) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver.cuGetErrorName.Try(status, &name);
  driver.cuGetErrorString.Try(status, &text);
  return Text(name == nullptr ? "an error that the driver has no name for" : name, " (",
              static_cast<int>(status), ")", text == nullptr ? "" : ": ",
              text == nullptr ? "" : text, Hint(status));
}

/*! \brief The lock that Launching scopes share and that a WaitingCall holds exclusively. */
std::shared_mutex& Door() {
  static auto* const door = new std::shared_mutex;  // never destroyed: used until process exit
  return *door;
}

/*! \brief Return whether a function waits for devices, or may wait. */
bool Waits(const std::string& name) {
  for (const char* waits :
       {"cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostAlloc", "cuMemFreeHost", "cuMemHostRegister_v2",
        "cuMemHostUnregister", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuIpcOpenMemHandle_v2",
        "cuIpcCloseMemHandle", "cuCtxEnablePeerAccess", "cuDevicePrimaryCtxRetain",
        "cuDevicePrimaryCtxRelease_v2", "cuModuleLoadData", "cuModuleUnload"}) {
    if (name == waits) return true;
  }
  return false;
}

}  // namespace

Launching::Launching(bool together) : lock_(Door(), std::defer_lock) {
  if (together) lock_.lock();
}

WaitingCall::WaitingCall(bool waits) : lock_(Door(), std::defer_lock) {
  if (waits) lock_.lock();
}

/*! \brief The driver, or the reason why there is none. */
struct Found {
  Driver driver;
  std::string why = driver.Start();

  /*! \brief Search once per process. A driver that is missing then stays missing until the process
   *         ends. */
  static const Found& Get() {
    static const Found found;
    return found;
  }
};

const char* Driver::Take(const DynamicLibrary& library) {
  const char* missing = nullptr;
  auto take = [&](auto* function, const char* name) {
    function->name_ = name;
    function->waits_ = Waits(name);
    return library.Find(name, &function->call_);
  };
#define TVM_IPC_TAKE(name, ...) \
  if (!take(&(name), #name) && missing == nullptr) missing = #name;
  TVM_IPC_DRIVER_FUNCTIONS(TVM_IPC_TAKE)
#undef TVM_IPC_TAKE
#define TVM_IPC_TAKE(name, ...) take(&(name), #name);
  TVM_IPC_DRIVER_OPTIONAL(TVM_IPC_TAKE)
#undef TVM_IPC_TAKE
  return missing;
}

std::string Driver::Start() {
  const DynamicLibrary library("libcuda.so.1");
  if (!library.error().empty()) {
    return Text("NVIDIA's driver was not found: ", library.error(),
                "; install it, or start the container with it");
  }
  if (const char* missing = Take(library)) {
    return Text("NVIDIA's driver has no function ", missing,
                "; it is older than CUDA 11.4: install a newer one");
  }
  Status status = cuInit.Try(0);
  if (status == kSuccess) status = cuDriverGetVersion.Try(&version_);
  if (status == kSuccess) status = cuDeviceGetCount.Try(&num_devices_);
  if (status != kSuccess) {
    return Text("NVIDIA's driver does not start: ", TextOf(*this, status));
  }
  if (num_devices_ == 0) {
    return "NVIDIA's driver sees no device; CUDA_VISIBLE_DEVICES may hide them";
  }
  return "";
}

const Driver* FindDriver(std::string* why) {
  const Found& found = Found::Get();
  if (found.why.empty()) return &found.driver;
  if (why != nullptr) *why = found.why;
  return nullptr;
}

const Driver& TheDriver() {
  std::string why;
  if (const Driver* driver = FindDriver(&why)) return *driver;
  Fail(kind::kRuntime, why);
}

std::string TextOf(Status status) { return TextOf(Found::Get().driver, status); }

void FailCall(const char* name, const char* what, Status status) {
  Fail(status == kOutOfMemory ? kind::kMemory : kind::kRuntime, what, ": ", name, ": ",
       TextOf(status));
}

}  // namespace tvm_ipc::cuda
