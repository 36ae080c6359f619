// SPDX-License-Identifier: Apache-2.0
// Devices, their attributes, and contexts.
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "call.h"
#include "context.h"
#include "settings.h"
#include "stream.h"

namespace cuda_double {
namespace {

std::atomic<int> initialised_in{0};

// Never freed: what a thread destroys when it ends may still use the driver.
std::vector<std::shared_ptr<Context>>& Stack() {
  static thread_local auto* stack = new std::vector<std::shared_ptr<Context>>;
  return *stack;
}

struct Primaries {
  std::mutex mutex;
  std::vector<std::shared_ptr<Context>> contexts;
};

Primaries& ThePrimaries() {
  static auto* primaries = new Primaries;
  return *primaries;
}

std::shared_ptr<Context> Primary(int device) {
  Primaries& primaries = ThePrimaries();
  std::lock_guard<std::mutex> lock(primaries.mutex);
  while (static_cast<int>(primaries.contexts.size()) < DeviceCount()) {
    auto context = std::make_shared<Context>();
    context->device = static_cast<int>(primaries.contexts.size());
    context->physical = TheSettings().devices[context->device];
    context->handle = Contexts().Add(context);
    primaries.contexts.push_back(context);
  }
  return primaries.contexts.at(device);
}

}  // namespace

Handles<Context>& Contexts() {
  static auto* contexts = new Handles<Context>(0xC0);
  return *contexts;
}

bool Initialised() { return initialised_in == getpid(); }

int DeviceCount() { return static_cast<int>(TheSettings().devices.size()); }

void RequireDevice(int device) {
  Require(device >= 0 && device < DeviceCount(), kInvalidDevice, "no such device");
}

bool CanAccessPeer(int device, int peer) {
  const Settings& settings = TheSettings();
  if (device == peer) return false;
  return settings.peers ||
         settings.peer_pairs.count({settings.devices[device], settings.devices[peer]}) != 0;
}

int DeviceAttribute(int attribute, int device) {
  const Settings& settings = TheSettings();
  if (auto set = settings.attributes.find(attribute); set != settings.attributes.end()) {
    return set->second;
  }
  // Never freed: destructors of others ask too.
  static const auto& known = *new std::map<int, int>{
      {1, 1024},                                   // threads of a block
      {2, 1024},                                   // and in each dimension
      {3, 1024},     {4, 64},    {5, 2147483647},  // blocks of a grid in each dimension
      {6, 65535},    {7, 65535}, {8, 49152},       // shared memory of a block
      {9, 65536},                                  // constant memory
      {10, 32},                                    // warp
      {12, 65536},                                 // registers of a block
      {13, 1000000},                               // kHz
      {15, 1},                                     // copies beside kernels
      {19, 1},                                     // maps host memory
      {31, 1},                                     // concurrent kernels
      {34, 0},                                     // PCI device
      {36, 1000000},                               // kHz of the memory
      {37, 1024},                                  // its bits
      {38, 1048576},                               // L2
      {39, 2048},                                  // threads of a multiprocessor
      {40, 2},                                     // copy engines
      {41, 1},                                     // unified addresses
      {50, 0},                                     // PCI domain
      {78, 1},                                     // priorities
      {81, 233472},                                // shared memory of a multiprocessor
      {82, 65536},                                 // its registers
      {90, 1},                                     // preemption
      {91, 1},  // host pointers of registered memory are good on the device
      {92, 1},  // stream memory operations
      {93, 1},       {94, 1},    {97, 232448},  // shared memory of a block, if asked for
      {99, 1},                                  // registers host memory
      {102, 1},                                 // virtual memory
      {103, 1},                                 // file descriptors
      {106, 32},                                // blocks of a multiprocessor
      {111, 1024},                              // shared memory that is taken
      {122, 1},      {123, 1},   {126, 4},      // memory synchronisation domains
  };
  switch (attribute) {
    case 16:
      return settings.multiprocessors;
    case 33:  // PCI bus
      return settings.devices[device] + 1;
    case 75:
      return settings.capability / 10;
    case 76:
      return settings.capability % 10;
    default:
      break;
  }
  auto found = known.find(attribute);
  if (found != known.end()) return found->second;
  Require(attribute > 0 && attribute < 148, kInvalidValue, "no such attribute");
  return 0;
}

Context& PrimaryContext(int device) { return *Primary(device); }

Context* CurrentContext() { return Stack().empty() ? nullptr : Stack().back().get(); }

std::shared_ptr<Context> ContextOf(Handle handle) {
  return Contexts().Get(handle, "no such context", kInvalidContext);
}

}  // namespace cuda_double

using namespace cuda_double;

CUDA_DOUBLE_API int cuInit(unsigned int flags) {
  return Call("cuInit", Needs::kNothing, [&] {
    Require(flags == 0, kInvalidValue, "flags of cuInit");
    Require(DeviceCount() > 0, kNoDevice, "no device is visible");
    int nobody = 0;
    if (!initialised_in.compare_exchange_strong(nobody, getpid())) {
      Require(nobody == getpid(), kNotInitialised, "the parent used CUDA before it forked");
    }
  });
}

CUDA_DOUBLE_API int cuDriverGetVersion(int* version) {
  return Call("cuDriverGetVersion", Needs::kNothing, [&] { *version = 13000; });
}

CUDA_DOUBLE_API int cuDeviceGetCount(int* count) {
  return Call("cuDeviceGetCount", Needs::kInit, [&] { *count = DeviceCount(); });
}

CUDA_DOUBLE_API int cuDeviceGet(int* device, int ordinal) {
  return Call("cuDeviceGet", Needs::kInit, [&] {
    RequireDevice(ordinal);
    *device = ordinal;
  });
}

CUDA_DOUBLE_API int cuDeviceGetName(char* name, int size, int device) {
  return Call("cuDeviceGetName", Needs::kInit, [&] {
    RequireDevice(device);
    Require(size > 0, kInvalidValue, "no room for a name");
    std::snprintf(name, size, "Pretend GPU %d", TheSettings().devices[device]);
  });
}

CUDA_DOUBLE_API int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  return Call("cuDeviceGetUuid", Needs::kInit, [&] {
    RequireDevice(device);
    std::memcpy(uuid, "tvm_ipc double ", 15);
    uuid[15] = static_cast<unsigned char>(TheSettings().devices[device]);
  });
}
CUDA_DOUBLE_API int cuDeviceGetUuid(unsigned char* uuid, int device) {
  return cuDeviceGetUuid_v2(uuid, device);
}

CUDA_DOUBLE_API int cuDeviceGetPCIBusId(char* text, int size, int device) {
  return Call("cuDeviceGetPCIBusId", Needs::kInit, [&] {
    RequireDevice(device);
    Require(size >= 13, kInvalidValue, "no room for a PCI bus");
    std::snprintf(text, size, "0000:%02x:00.0", TheSettings().devices[device] + 1);
  });
}

CUDA_DOUBLE_API int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  return Call("cuDeviceTotalMem", Needs::kInit, [&] {
    RequireDevice(device);
    *bytes = TheSettings().memory;
  });
}

CUDA_DOUBLE_API int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return Call("cuDeviceGetAttribute", Needs::kInit, [&] {
    RequireDevice(device);
    *value = DeviceAttribute(attribute, device);
  });
}

CUDA_DOUBLE_API int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  return Call("cuDeviceCanAccessPeer", Needs::kInit, [&] {
    RequireDevice(device);
    RequireDevice(peer);
    *can = CanAccessPeer(device, peer) ? 1 : 0;
  });
}

CUDA_DOUBLE_API int cuDeviceGetP2PAttribute(int* value, int attribute, int device, int peer) {
  return Call("cuDeviceGetP2PAttribute", Needs::kInit, [&] {
    RequireDevice(device);
    RequireDevice(peer);
    Require(device != peer, kInvalidDevice, "a device is no peer of itself");
    Require(attribute >= 1 && attribute <= 5, kInvalidValue, "no such attribute");
    bool access = CanAccessPeer(device, peer);
    *value = attribute == 2 || attribute == 3 ? access : 0;
  });
}

CUDA_DOUBLE_API int cuDevicePrimaryCtxRetain(Handle* context, int device) {
  return Call("cuDevicePrimaryCtxRetain", Needs::kInit, [&] {
    RequireDevice(device);
    Context& primary = PrimaryContext(device);
    std::lock_guard<std::mutex> lock(primary.mutex);
    ++primary.retained;
    *context = primary.handle;
  });
}

CUDA_DOUBLE_API int cuDevicePrimaryCtxRelease_v2(int device) {
  return Call("cuDevicePrimaryCtxRelease", Needs::kInit, [&] {
    RequireDevice(device);
    Context& primary = PrimaryContext(device);
    std::lock_guard<std::mutex> lock(primary.mutex);
    Require(primary.retained > 0, kInvalidContext, "the primary context is not retained");
    --primary.retained;
  });
}

CUDA_DOUBLE_API int cuDevicePrimaryCtxGetState(int device, unsigned int* flags, int* active) {
  return Call("cuDevicePrimaryCtxGetState", Needs::kInit, [&] {
    RequireDevice(device);
    *flags = 0;
    *active = PrimaryContext(device).retained > 0 ? 1 : 0;
  });
}

CUDA_DOUBLE_API int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned int) {
  return Call("cuDevicePrimaryCtxSetFlags", Needs::kInit, [&] { RequireDevice(device); });
}

CUDA_DOUBLE_API int cuCtxGetCurrent(Handle* context) {
  return Call("cuCtxGetCurrent", Needs::kInit,
              [&] { *context = CurrentContext() == nullptr ? 0 : CurrentContext()->handle; });
}

CUDA_DOUBLE_API int cuCtxSetCurrent(Handle context) {
  return Call("cuCtxSetCurrent", Needs::kInit, [&] {
    std::shared_ptr<Context> next = context == 0 ? nullptr : ContextOf(context);
    if (!Stack().empty()) Stack().pop_back();
    if (next != nullptr) Stack().push_back(next);
  });
}

CUDA_DOUBLE_API int cuCtxPushCurrent_v2(Handle context) {
  return Call("cuCtxPushCurrent", Needs::kInit, [&] { Stack().push_back(ContextOf(context)); });
}

CUDA_DOUBLE_API int cuCtxPopCurrent_v2(Handle* context) {
  return Call("cuCtxPopCurrent", Needs::kInit, [&] {
    Require(!Stack().empty(), kInvalidContext, "this thread has no current context");
    if (context != nullptr) *context = Stack().back()->handle;
    Stack().pop_back();
  });
}

CUDA_DOUBLE_API int cuCtxGetDevice(int* device) {
  return Call("cuCtxGetDevice", Needs::kContext,
              [&](Context& context) { *device = context.device; });
}

CUDA_DOUBLE_API int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return Call("cuCtxGetStreamPriorityRange", Needs::kContext, [&](Context&) {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
  });
}

CUDA_DOUBLE_API int cuCtxSynchronize() {
  int result = Call("cuCtxSynchronize", Needs::kContext, [&](Context& context) {
    RequireNoCaptureIn(context);
    WaitForContext(context);
  });
  return result == kSuccess ? Call("cuCtxSynchronize (faults)", Needs::kContext, [] {}) : result;
}

CUDA_DOUBLE_API int cuCtxEnablePeerAccess(Handle peer, unsigned int flags) {
  return Call("cuCtxEnablePeerAccess", Needs::kUnsafe, [&](Context& context) {
    Require(flags == 0, kInvalidValue, "flags of cuCtxEnablePeerAccess");
    int device = ContextOf(peer)->device;
    Require(device != context.device, kInvalidDevice, "a device is no peer of itself");
    Require(CanAccessPeer(context.device, device), kPeerUnsupported, "no access between them");
    std::lock_guard<std::mutex> lock(context.mutex);
    Require(context.peers.insert(device).second, kPeerEnabled, "already");
  });
}

CUDA_DOUBLE_API int cuCtxDisablePeerAccess(Handle peer) {
  return Call("cuCtxDisablePeerAccess", Needs::kUnsafe, [&](Context& context) {
    int device = ContextOf(peer)->device;
    std::lock_guard<std::mutex> lock(context.mutex);
    Require(context.peers.erase(device) == 1, kPeerNotEnabled, "it was not enabled");
  });
}
