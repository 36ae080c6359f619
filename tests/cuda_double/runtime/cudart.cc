// SPDX-License-Identifier: Apache-2.0
// The runtime library: the driver's functions, with a device for each thread and a last error.
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "driver_api.h"

#define RUNTIME_API extern "C" __attribute__((visibility("default"))) int

namespace {

constexpr int kNoDevice = 100, kInvalidDevice = 101, kNotReady = 600;
constexpr int kInvalidMemcpyDirection = 21;

thread_local int last_error = 0;
thread_local int device_of_thread = 0;

int Remember(int result) {
  if (result != 0 && result != kNotReady) last_error = result;
  return result;
}

int Start() {
  static int result = cuInit(0);
  return result == 0 ? cuInit(0) : result;  // in a child of a fork it fails anew
}

// The primary context of the device, kept until the process ends.
int ContextOf(int device, Handle* context) {
  static std::mutex mutex;
  static auto& contexts = *new std::vector<Handle>(256);  // never freed
  std::lock_guard<std::mutex> lock(mutex);
  if (contexts[device] == 0) {
    int result = cuDevicePrimaryCtxRetain(&contexts[device], device);
    if (result != 0) return result;
  }
  *context = contexts[device];
  return 0;
}

// Makes the thread's device the current one. A context that the driver's API made current stays.
int EnsureContext() {
  if (int result = Start()) return result;
  Handle current = 0;
  if (int result = cuCtxGetCurrent(&current)) return result;
  if (current != 0) return 0;
  if (int result = ContextOf(device_of_thread, &current)) return result;
  return cuCtxSetCurrent(current);
}

// A function of the runtime that needs a context.
template <class F>
int Run(const char* name, F&& body) {
  if (int result = tvm_ipc_double_count(name)) return Remember(result);
  if (int result = EnsureContext()) return Remember(result);
  return Remember(body());
}

// One that needs the driver only.
template <class F>
int RunWithout(const char* name, F&& body) {
  if (int result = tvm_ipc_double_count(name)) return Remember(result);
  if (int result = Start()) return Remember(result);
  return Remember(body());
}

Pointer At(const void* pointer) { return reinterpret_cast<Pointer>(pointer); }

// The parts of cudaDeviceProp that are filled, by their place in CUDA 13's headers.
constexpr size_t kPropertiesBytes = 1008;
template <class T>
void Put(void* properties, size_t at, T value) {
  std::memcpy(static_cast<char*>(properties) + at, &value, sizeof(value));
}

int Properties(void* properties, int device) {
  std::memset(properties, 0, kPropertiesBytes);
  if (int result = cuDeviceGetName(static_cast<char*>(properties), 256, device)) return result;
  cuDeviceGetUuid_v2(static_cast<unsigned char*>(properties) + 256, device);
  size_t memory = 0;
  cuDeviceTotalMem_v2(&memory, device);
  Put(properties, 288, memory);
  // Pairs of a place and the attribute that belongs there.
  static constexpr int kInts[][2] = {
      {304, 12}, {308, 10}, {320, 1},  {324, 2},  {328, 3},  {332, 4},  {336, 5},  {340, 6},
      {344, 7},  {360, 75}, {364, 76}, {384, 16}, {568, 33}, {588, 41}, {596, 38}, {604, 39}};
  static constexpr int kSizes[][2] = {{296, 8}, {352, 9}, {624, 81}, {672, 97}};
  int value = 0;
  for (auto [at, attribute] : kInts) {
    if (int result = cuDeviceGetAttribute(&value, attribute, device)) return result;
    Put(properties, at, value);
  }
  for (auto [at, attribute] : kSizes) {
    if (int result = cuDeviceGetAttribute(&value, attribute, device)) return result;
    Put(properties, at, static_cast<size_t>(value));
  }
  return 0;
}

int Copy(void* to, const void* from, size_t bytes, int kind, Handle stream, bool wait) {
  switch (kind) {
    case 0:
      if (bytes > 0) std::memmove(to, from, bytes);
      return 0;
    case 1:
      return wait ? cuMemcpyHtoD_v2(At(to), from, bytes)
                  : cuMemcpyHtoDAsync_v2(At(to), from, bytes, stream);
    case 2:
      return wait ? cuMemcpyDtoH_v2(to, At(from), bytes)
                  : cuMemcpyDtoHAsync_v2(to, At(from), bytes, stream);
    case 3:
      return wait ? cuMemcpyDtoD_v2(At(to), At(from), bytes)
                  : cuMemcpyDtoDAsync_v2(At(to), At(from), bytes, stream);
    case 4:
      return wait ? cuMemcpy(At(to), At(from), bytes)
                  : cuMemcpyAsync(At(to), At(from), bytes, stream);
    default:
      return kInvalidMemcpyDirection;
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorName(int result) {
  if (result == kInvalidMemcpyDirection) return "cudaErrorInvalidMemcpyDirection";
  const char* name = tvm_ipc_double_runtime_name(result);
  return name == nullptr ? "unrecognized error code" : name;
}

extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorString(int result) {
  const char* text = nullptr;
  cuGetErrorString(result, &text);
  return text == nullptr ? "unrecognized error code" : text;
}

RUNTIME_API cudaGetLastError() { return std::exchange(last_error, 0); }
RUNTIME_API cudaPeekAtLastError() { return last_error; }

RUNTIME_API cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return 0;
}
RUNTIME_API cudaDriverGetVersion(int* version) { return Remember(cuDriverGetVersion(version)); }

RUNTIME_API cudaGetDeviceCount(int* count) {
  *count = 0;
  return RunWithout("cudaGetDeviceCount", [&] { return cuDeviceGetCount(count); });
}

RUNTIME_API cudaSetDevice(int device) {
  return RunWithout("cudaSetDevice", [&] {
    int count = 0;
    if (int result = cuDeviceGetCount(&count)) return result;
    if (count == 0) return kNoDevice;
    if (device < 0 || device >= count) return kInvalidDevice;
    Handle context = 0;
    if (int result = ContextOf(device, &context)) return result;
    device_of_thread = device;
    return cuCtxSetCurrent(context);
  });
}

RUNTIME_API cudaGetDevice(int* device) {
  return RunWithout("cudaGetDevice", [&] {
    Handle current = 0;
    if (int result = cuCtxGetCurrent(&current)) return result;
    *device = device_of_thread;
    return current == 0 ? 0 : cuCtxGetDevice(device);
  });
}

RUNTIME_API cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return RunWithout("cudaDeviceGetAttribute",
                    [&] { return cuDeviceGetAttribute(value, attribute, device); });
}

RUNTIME_API cudaGetDeviceProperties(void* properties, int device) {
  return RunWithout("cudaGetDeviceProperties", [&] { return Properties(properties, device); });
}

RUNTIME_API cudaDeviceGetPCIBusId(char* text, int size, int device) {
  return RunWithout("cudaDeviceGetPCIBusId",
                    [&] { return cuDeviceGetPCIBusId(text, size, device); });
}

RUNTIME_API cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return RunWithout("cudaDeviceCanAccessPeer",
                    [&] { return cuDeviceCanAccessPeer(can, device, peer); });
}

RUNTIME_API cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
  return Run("cudaDeviceEnablePeerAccess", [&] {
    int count = 0;
    if (int result = cuDeviceGetCount(&count)) return result;
    if (peer < 0 || peer >= count) return kInvalidDevice;
    Handle context = 0;
    if (int result = ContextOf(peer, &context)) return result;
    return cuCtxEnablePeerAccess(context, flags);
  });
}

RUNTIME_API cudaDeviceSynchronize() {
  return Run("cudaDeviceSynchronize", [] { return cuCtxSynchronize(); });
}

RUNTIME_API cudaMemGetInfo(size_t* free, size_t* total) {
  return Run("cudaMemGetInfo", [&] { return cuMemGetInfo_v2(free, total); });
}

RUNTIME_API cudaMalloc(void** pointer, size_t bytes) {
  return Run("cudaMalloc", [&] {
    *pointer = nullptr;
    return bytes == 0 ? 0 : cuMemAlloc_v2(reinterpret_cast<Pointer*>(pointer), bytes);
  });
}

RUNTIME_API cudaFree(void* pointer) {
  return Run("cudaFree", [&] { return cuMemFree_v2(At(pointer)); });
}

RUNTIME_API cudaMallocHost(void** pointer, size_t bytes) {
  return Run("cudaMallocHost", [&] { return cuMemHostAlloc(pointer, bytes, 0); });
}
RUNTIME_API cudaHostAlloc(void** pointer, size_t bytes, unsigned int flags) {
  return Run("cudaHostAlloc", [&] { return cuMemHostAlloc(pointer, bytes, flags); });
}
RUNTIME_API cudaFreeHost(void* pointer) {
  return Run("cudaFreeHost", [&] { return pointer == nullptr ? 0 : cuMemFreeHost(pointer); });
}
RUNTIME_API cudaHostRegister(void* pointer, size_t bytes, unsigned int flags) {
  return Run("cudaHostRegister", [&] { return cuMemHostRegister_v2(pointer, bytes, flags); });
}
RUNTIME_API cudaHostUnregister(void* pointer) {
  return Run("cudaHostUnregister", [&] { return cuMemHostUnregister(pointer); });
}
RUNTIME_API cudaHostGetDevicePointer(void** device, void* host, unsigned int flags) {
  return Run("cudaHostGetDevicePointer", [&] {
    return cuMemHostGetDevicePointer_v2(reinterpret_cast<Pointer*>(device), host, flags);
  });
}

RUNTIME_API cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  return Run("cudaMemcpy", [&] { return Copy(to, from, bytes, kind, 0, true); });
}
RUNTIME_API cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, Handle stream) {
  return Run("cudaMemcpyAsync", [&] { return Copy(to, from, bytes, kind, stream, false); });
}
RUNTIME_API cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                size_t bytes, Handle stream) {
  return Run("cudaMemcpyPeerAsync", [&] {
    int count = 0;
    if (int result = cuDeviceGetCount(&count)) return result;
    if (to_device < 0 || from_device < 0 || to_device >= count || from_device >= count) {
      return kInvalidDevice;
    }
    Handle there = 0, here = 0;
    if (int result = ContextOf(to_device, &there)) return result;
    if (int result = ContextOf(from_device, &here)) return result;
    return cuMemcpyPeerAsync(At(to), there, At(from), here, bytes, stream);
  });
}
RUNTIME_API cudaMemset(void* to, int value, size_t bytes) {
  return Run("cudaMemset",
             [&] { return cuMemsetD8_v2(At(to), static_cast<unsigned char>(value), bytes); });
}
RUNTIME_API cudaMemsetAsync(void* to, int value, size_t bytes, Handle stream) {
  return Run("cudaMemsetAsync", [&] {
    return cuMemsetD8Async(At(to), static_cast<unsigned char>(value), bytes, stream);
  });
}

RUNTIME_API cudaIpcGetMemHandle(IpcMemory* handle, void* pointer) {
  return Run("cudaIpcGetMemHandle", [&] { return cuIpcGetMemHandle(handle, At(pointer)); });
}
RUNTIME_API cudaIpcOpenMemHandle(void** pointer, IpcMemory handle, unsigned int flags) {
  return Run("cudaIpcOpenMemHandle", [&] {
    return cuIpcOpenMemHandle_v2(reinterpret_cast<Pointer*>(pointer), handle, flags);
  });
}
RUNTIME_API cudaIpcCloseMemHandle(void* pointer) {
  return Run("cudaIpcCloseMemHandle", [&] { return cuIpcCloseMemHandle(At(pointer)); });
}

RUNTIME_API cudaStreamCreateWithPriority(Handle* stream, unsigned int flags, int priority) {
  return Run("cudaStreamCreate",
             [&] { return cuStreamCreateWithPriority(stream, flags, priority); });
}
RUNTIME_API cudaStreamCreateWithFlags(Handle* stream, unsigned int flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
RUNTIME_API cudaStreamCreate(Handle* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
RUNTIME_API cudaStreamDestroy(Handle stream) {
  return Run("cudaStreamDestroy", [&] { return cuStreamDestroy_v2(stream); });
}
RUNTIME_API cudaStreamSynchronize(Handle stream) {
  return Run("cudaStreamSynchronize", [&] { return cuStreamSynchronize(stream); });
}
RUNTIME_API cudaStreamQuery(Handle stream) {
  return Run("cudaStreamQuery", [&] { return cuStreamQuery(stream); });
}
RUNTIME_API cudaStreamWaitEvent(Handle stream, Handle event, unsigned int flags) {
  return Run("cudaStreamWaitEvent", [&] { return cuStreamWaitEvent(stream, event, flags); });
}
RUNTIME_API cudaStreamBeginCapture(Handle stream, int mode) {
  return Run("cudaStreamBeginCapture", [&] { return cuStreamBeginCapture_v2(stream, mode); });
}
RUNTIME_API cudaStreamEndCapture(Handle stream, Handle* graph) {
  return Run("cudaStreamEndCapture", [&] { return cuStreamEndCapture(stream, graph); });
}
RUNTIME_API cudaStreamIsCapturing(Handle stream, int* status) {
  return Run("cudaStreamIsCapturing", [&] { return cuStreamIsCapturing(stream, status); });
}

RUNTIME_API cudaEventCreateWithFlags(Handle* event, unsigned int flags) {
  return Run("cudaEventCreate", [&] { return cuEventCreate(event, flags); });
}
RUNTIME_API cudaEventCreate(Handle* event) { return cudaEventCreateWithFlags(event, 0); }
RUNTIME_API cudaEventDestroy(Handle event) {
  return Run("cudaEventDestroy", [&] { return cuEventDestroy_v2(event); });
}
RUNTIME_API cudaEventRecord(Handle event, Handle stream) {
  return Run("cudaEventRecord", [&] { return cuEventRecord(event, stream); });
}
RUNTIME_API cudaEventQuery(Handle event) {
  return Run("cudaEventQuery", [&] { return cuEventQuery(event); });
}
RUNTIME_API cudaEventSynchronize(Handle event) {
  return Run("cudaEventSynchronize", [&] { return cuEventSynchronize(event); });
}
RUNTIME_API cudaEventElapsedTime(float* milliseconds, Handle start, Handle end) {
  return Run("cudaEventElapsedTime",
             [&] { return cuEventElapsedTime_v2(milliseconds, start, end); });
}

RUNTIME_API cudaGraphInstantiate(Handle* exec, Handle graph, unsigned long long flags) {
  return Run("cudaGraphInstantiate",
             [&] { return cuGraphInstantiateWithFlags(exec, graph, flags); });
}
RUNTIME_API cudaGraphLaunch(Handle exec, Handle stream) {
  return Run("cudaGraphLaunch", [&] { return cuGraphLaunch(exec, stream); });
}
RUNTIME_API cudaGraphDestroy(Handle graph) {
  return Run("cudaGraphDestroy", [&] { return cuGraphDestroy(graph); });
}
RUNTIME_API cudaGraphExecDestroy(Handle exec) {
  return Run("cudaGraphExecDestroy", [&] { return cuGraphExecDestroy(exec); });
}
