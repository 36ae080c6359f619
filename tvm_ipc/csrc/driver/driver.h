/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file driver.h
 * \brief NVIDIA's driver: the functions that we call, found in libcuda.so.1 when somebody asks.
 *
 * The types and numbers are those of the driver's interface, declared here, so that a machine
 * without CUDA builds and runs this library. Nothing is loaded before `TheDriver` or `FindDriver`
 * is called.
 */
#ifndef TVM_IPC_DRIVER_DRIVER_H_
#define TVM_IPC_DRIVER_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <string>

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
/*! \brief Where memory is: CUmemLocation. */
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

/*! \brief What a call returns: CUresult. */
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

/*! \brief CUdevice_attribute, as far as we ask. */
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
/*! \brief CUdevice_P2PAttribute: whether atomic operations pass, as they do over NVLink. */
constexpr int kPeerAtomics = 3;

constexpr unsigned kNonBlocking = 1;     // of a stream
constexpr unsigned kWithoutTiming = 2;   // of an event
constexpr unsigned kPortableMapped = 3;  // of host memory: for all contexts, mapped into devices
constexpr int kRelaxedCapture = 2;
constexpr int kNotCapturing = 0;

/*! \brief The name and the text of a status, and what to do about it. */
std::string TextOf(Status status);

/*!
 * \brief Kernels that wait for each other are being launched by threads of this process: for as
 *        long as one of these lives, no call of ours begins that waits for the process's devices.
 *
 * Such a call would wait for the kernel that was launched first, and keep the thread that has the
 * other one from launching it. Calls of others are not stopped: TVM's, the program's.
 */
class Launching {
 public:
  /*! \param together Whether they are: otherwise this does nothing. */
  explicit Launching(bool together);

 private:
  std::shared_lock<std::shared_mutex> lock_;
};

/*! \brief A call that waits for the process's devices. */
class WaitingCall {
 public:
  explicit WaitingCall(bool waits);

 private:
  std::unique_lock<std::shared_mutex> lock_;
};

/*!
 * \brief A function of the driver.
 *
 * A call throws Error where it fails; the first argument says what was being done. `Try` returns
 * what the driver returned.
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
  /*! \brief Older drivers lack some. */
  bool exists() const { return call_ != nullptr; }

 private:
  friend class Driver;
  [[noreturn]] void FailCall(const char* what, Status status) const;
  const char* name_ = nullptr;
  /*! \brief Whether it may wait for all that the process has on its devices. */
  bool waits_ = false;
  Status (*call_)(Args...) = nullptr;
};

/*! \brief Throws the error of a call. */
[[noreturn]] void FailCall(const char* name, const char* what, Status status);

template <typename... Args>
void Function<Args...>::FailCall(const char* what, Status status) const {
  cuda::FailCall(name_, what, status);
}

/*! \brief The functions, by the names that libcuda.so.1 has. Of them X(name, parameters...). */
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
/*! \brief Those that a driver may lack. */
#define TVM_IPC_DRIVER_OPTIONAL(X) X(cuFuncLoad, Kernel)

/*! \brief The driver of this machine, initialised. */
class Driver {
 public:
#define TVM_IPC_DECLARE(name, ...) Function<__VA_ARGS__> name;
  TVM_IPC_DRIVER_FUNCTIONS(TVM_IPC_DECLARE)
  TVM_IPC_DRIVER_OPTIONAL(TVM_IPC_DECLARE)
#undef TVM_IPC_DECLARE

  /*! \brief As 13000 for 13.0: the newest CUDA that it serves. */
  int version() const { return version_; }
  int num_devices() const { return num_devices_; }

 private:
  friend struct Found;
  /*! \brief Find it and start it. Returns why that cannot be, or nothing. */
  std::string Start();
  /*! \brief The first function that the library lacks; nullptr if it has all. */
  const char* Take(void* library);

  int version_ = 0;
  int num_devices_ = 0;
};

/*! \brief The driver; an error that says why there is none, or no device. */
const Driver& TheDriver();
/*! \brief The same, or nullptr and why. */
const Driver* FindDriver(std::string* why);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_DRIVER_DRIVER_H_
