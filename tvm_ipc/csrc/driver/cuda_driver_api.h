/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file cuda_driver_api.h
 * \brief The functions of NVIDIA's driver that this library calls, loaded from libcuda.so.1 on
 *        first use.
 *
 * This file declares the types and constants of the driver's interface, so that the library builds
 * and runs on a machine without CUDA. The first call of `TheDriver` or `FindDriver` loads the
 * driver.
 */
#ifndef TVM_IPC_DRIVER_CUDA_DRIVER_API_H_
#define TVM_IPC_DRIVER_CUDA_DRIVER_API_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "core/dynamic_library.h"

namespace tvm_ipc::cuda {

/*! \brief An address in device memory. */
using Address = unsigned long long;  // NOLINT: the driver's type
using Context = struct CUctx_st*;
using Module = struct CUmod_st*;
using Kernel = struct CUfunc_st*;
using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;
using Allocation = unsigned long long;  // NOLINT: the driver's type

struct Uuid {
  char bytes[16];
};
struct IpcHandle {
  char bytes[64];
};
/*! \brief The location of memory: CUmemLocation. */
struct Location {
  int type = 1;  // a device
  int id = 0;
};
/*! \brief CUmemAllocationProp. */
struct AllocationProperties {
  int type = 1;          // pinned
  int handle_types = 1;  // a POSIX file descriptor
  Location location;
  void* unused = nullptr;
  unsigned char flags[8] = {};
};
/*! \brief CUmemAccessDesc. */
struct Access {
  Location location;
  int flags = 3;  // read and write
};
static_assert(sizeof(AllocationProperties) == 32 && sizeof(Access) == 12, "as the driver has them");

/*! \brief The result of a call: CUresult. */
enum Status : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialised = 3,
  kDeinitialised = 4,
  kStubLibrary = 34,
  kNoDevice = 100,
  kInvalidImage = 200,
  kNoBinaryForGpu = 209,
  kUnsupportedPtx = 222,
  kOperatingSystem = 304,
  kNotFound = 500,
  kNotReady = 600,
  kPeerAccessAlreadyEnabled = 704,
  kHostMemoryAlreadyRegistered = 712,
  kNotPermitted = 800,
  kNotSupported = 801,
  kSystemNotReady = 802,
  kSystemDriverMismatch = 803,
};

/*! \brief The values of CUdevice_attribute that are used here. */
enum Attribute : int {
  kMultiprocessors = 16,
  kIntegrated = 18,
  kPciBus = 33,
  kPciDevice = 34,
  kPciDomain = 50,
  kCapabilityMajor = 75,
  kCapabilityMinor = 76,
  kVirtualMemory = 102,
  kPosixFiles = 103,
};
/*! \brief A CUdevice_P2PAttribute: whether atomic operations are supported, as over NVLink. */
constexpr int kPeerAtomics = 3;

constexpr unsigned kNonBlocking = 1;     // for streams
constexpr unsigned kWithoutTiming = 2;   // for events
constexpr unsigned kPortableMapped = 3;  // for host memory: in all contexts, mapped into devices
constexpr int kRelaxedCapture = 2;
constexpr int kNotCapturing = 0;

/*! \brief Return the name and the text of a status, and what to do about it. */
std::string TextOf(Status status);

/*!
 * \brief A scope in which threads of this process launch kernels that wait for each other. While
 *        any such scope is active, this library begins no call that waits for the process's
 *        devices.
 *
 * Such a call would wait for the kernel that was launched first, and block the thread that is to
 * launch the other one. Calls by others, such as TVM or the program, are not blocked.
 */
class Launching {
 public:
  /*! \param together Whether the kernels wait for each other. If not, this scope does nothing. */
  explicit Launching(bool together);

 private:
  std::shared_lock<std::shared_mutex> lock_;
};

/*! \brief The scope of a call that waits for the process's devices. */
class WaitingCall {
 public:
  explicit WaitingCall(bool waits);

 private:
  std::unique_lock<std::shared_mutex> lock_;
};

/*!
 * \brief A function of the driver.
 *
 * A call throws Error if it fails; its first argument describes the action for the message. `Try`
 * returns the driver's status instead.
 */
template <typename... Args>
class Function {
 public:
  void operator()(const char* what, Args... args) const {
    const Status status = Try(args...);
    if (status != kSuccess) FailCall(what, status);
  }
  Status Try(Args... args) const {
    const WaitingCall waiting(waits_);
    return call_(args...);
  }
  /*! \brief Return whether the driver has the function. Older drivers lack some. */
  bool exists() const { return call_ != nullptr; }

 private:
  friend class Driver;
  [[noreturn]] void FailCall(const char* what, Status status) const;
  const char* name_ = nullptr;
  /*! \brief Whether the function may wait for everything that the process runs on its devices. */
  bool waits_ = false;
  Status (*call_)(Args...) = nullptr;
};

/*! \brief Throw the error of a call. */
[[noreturn]] void FailCall(const char* name, const char* what, Status status);

template <typename... Args>
void Function<Args...>::FailCall(const char* what, Status status) const {
  cuda::FailCall(name_, what, status);
}

/*! \brief Expand X(name, parameters...) for each function, named as in libcuda.so.1. */
#define TVM_IPC_DRIVER_FUNCTIONS(X)                                                               \
  X(cuInit, unsigned)                                                                             \
  X(cuDriverGetVersion, int*)                                                                     \
  X(cuGetErrorName, Status, const char**)                                                         \
  X(cuGetErrorString, Status, const char**)                                                       \
  X(cuDeviceGetCount, int*)                                                                       \
  X(cuDeviceGet, int*, int)                                                                       \
  X(cuDeviceGetName, char*, int, int)                                                             \
  X(cuDeviceGetUuid_v2, Uuid*, int)                                                               \
  X(cuDeviceGetAttribute, int*, int, int)                                                         \
  X(cuDeviceTotalMem_v2, size_t*, int)                                                            \
  X(cuDeviceCanAccessPeer, int*, int, int)                                                        \
  X(cuDeviceGetP2PAttribute, int*, int, int, int)                                                 \
  X(cuDevicePrimaryCtxRetain, Context*, int)                                                      \
  X(cuDevicePrimaryCtxRelease_v2, int)                                                            \
  X(cuCtxPushCurrent_v2, Context)                                                                 \
  X(cuCtxPopCurrent_v2, Context*)                                                                 \
  X(cuCtxGetCurrent, Context*)                                                                    \
  X(cuCtxEnablePeerAccess, Context, unsigned)                                                     \
  X(cuMemGetInfo_v2, size_t*, size_t*)                                                            \
  X(cuMemAlloc_v2, Address*, size_t)                                                              \
  X(cuMemFree_v2, Address)                                                                        \
  X(cuMemHostAlloc, void**, size_t, unsigned)                                                     \
  X(cuMemFreeHost, void*)                                                                         \
  X(cuMemHostRegister_v2, void*, size_t, unsigned)                                                \
  X(cuMemHostUnregister, void*)                                                                   \
  X(cuMemHostGetDevicePointer_v2, Address*, void*, unsigned)                                      \
  X(cuPointerGetAttribute, void*, int, Address)                                                   \
  X(cuMemcpyAsync, Address, Address, size_t, Stream)                                              \
  X(cuMemsetD8Async, Address, unsigned char, size_t, Stream)                                      \
  X(cuMemsetD32Async, Address, unsigned, size_t, Stream)                                          \
  X(cuMemGetAllocationGranularity, size_t*, const AllocationProperties*, int)                     \
  X(cuMemCreate, Allocation*, size_t, const AllocationProperties*, unsigned long long)            \
  X(cuMemRelease, Allocation)                                                                     \
  X(cuMemAddressReserve, Address*, size_t, size_t, Address, unsigned long long)                   \
  X(cuMemAddressFree, Address, size_t)                                                            \
  X(cuMemMap, Address, size_t, size_t, Allocation, unsigned long long)                            \
  X(cuMemUnmap, Address, size_t)                                                                  \
  X(cuMemSetAccess, Address, size_t, const Access*, size_t)                                       \
  X(cuMemExportToShareableHandle, void*, Allocation, int, unsigned long long)                     \
  X(cuMemImportFromShareableHandle, Allocation*, void*, int)                                      \
  X(cuIpcGetMemHandle, IpcHandle*, Address)                                                       \
  X(cuIpcOpenMemHandle_v2, Address*, IpcHandle, unsigned)                                         \
  X(cuIpcCloseMemHandle, Address)                                                                 \
  X(cuStreamCreate, Stream*, unsigned)                                                            \
  X(cuStreamDestroy_v2, Stream)                                                                   \
  X(cuStreamSynchronize, Stream)                                                                  \
  X(cuStreamQuery, Stream)                                                                        \
  X(cuStreamWaitEvent, Stream, Event, unsigned)                                                   \
  X(cuStreamIsCapturing, Stream, int*)                                                            \
  X(cuThreadExchangeStreamCaptureMode, int*)                                                      \
  X(cuEventCreate, Event*, unsigned)                                                              \
  X(cuEventDestroy_v2, Event)                                                                     \
  X(cuEventRecord, Event, Stream)                                                                 \
  X(cuEventQuery, Event)                                                                          \
  X(cuEventSynchronize, Event)                                                                    \
  X(cuModuleLoadData, Module*, const void*)                                                       \
  X(cuModuleUnload, Module)                                                                       \
  X(cuModuleGetFunction, Kernel*, Module, const char*)                                            \
  X(cuFuncGetAttribute, int*, int, Kernel)                                                        \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, int*, Kernel, int, size_t)                       \
  X(cuLaunchKernel, Kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
    Stream, void**, void**)
/*! \brief Expand X likewise for the functions that a driver may lack. */
#define TVM_IPC_DRIVER_OPTIONAL(X) X(cuFuncLoad, Kernel)

/*! \brief The driver of this machine, initialised. */
class Driver {
 public:
#define TVM_IPC_DECLARE(name, ...) Function<__VA_ARGS__> name;
  TVM_IPC_DRIVER_FUNCTIONS(TVM_IPC_DECLARE)
  TVM_IPC_DRIVER_OPTIONAL(TVM_IPC_DECLARE)
#undef TVM_IPC_DECLARE

  /*! \brief Return the newest CUDA version that the driver supports: 13000 for 13.0. */
  int version() const { return version_; }
  int num_devices() const { return num_devices_; }

 private:
  friend struct Found;
  /*! \brief Load and initialise the driver. Return why that fails, or "". */
  std::string Start();
  /*! \brief Load all functions. Return the first required one that is missing, or nullptr. */
  const char* Take(const DynamicLibrary& library);

  int version_ = 0;
  int num_devices_ = 0;
};

/*! \brief Return the driver. Throw an error with the reason if there is no driver or no device. */
const Driver& TheDriver();
/*! \brief Return the driver, or nullptr with the reason in `why`. */
const Driver* FindDriver(std::string* why);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_DRIVER_CUDA_DRIVER_API_H_
