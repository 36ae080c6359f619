// SPDX-License-Identifier: Apache-2.0
// What the runtime library uses of the driver.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_RUNTIME_DRIVER_API_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_RUNTIME_DRIVER_API_H_

#include <cstddef>
#include <cstdint>

using Handle = uint64_t;
using Pointer = uint64_t;

struct IpcMemory {
  char bytes[64];
};

extern "C" {
int tvm_ipc_double_count(const char* name);
const char* tvm_ipc_double_runtime_name(int result);
int cuInit(unsigned int);
int cuDriverGetVersion(int*);
int cuDeviceGetCount(int*);
int cuDeviceGetName(char*, int, int);
int cuDeviceGetUuid_v2(unsigned char*, int);
int cuDeviceGetPCIBusId(char*, int, int);
int cuDeviceTotalMem_v2(size_t*, int);
int cuDeviceGetAttribute(int*, int, int);
int cuDeviceCanAccessPeer(int*, int, int);
int cuDevicePrimaryCtxRetain(Handle*, int);
int cuCtxSetCurrent(Handle);
int cuCtxGetCurrent(Handle*);
int cuCtxGetDevice(int*);
int cuCtxSynchronize();
int cuCtxEnablePeerAccess(Handle, unsigned int);
int cuGetErrorString(int, const char**);
int cuMemGetInfo_v2(size_t*, size_t*);
int cuMemAlloc_v2(Pointer*, size_t);
int cuMemFree_v2(Pointer);
int cuMemHostAlloc(void**, size_t, unsigned int);
int cuMemFreeHost(void*);
int cuMemHostRegister_v2(void*, size_t, unsigned int);
int cuMemHostUnregister(void*);
int cuMemHostGetDevicePointer_v2(Pointer*, void*, unsigned int);
int cuMemcpy(Pointer, Pointer, size_t);
int cuMemcpyAsync(Pointer, Pointer, size_t, Handle);
int cuMemcpyHtoD_v2(Pointer, const void*, size_t);
int cuMemcpyHtoDAsync_v2(Pointer, const void*, size_t, Handle);
int cuMemcpyDtoH_v2(void*, Pointer, size_t);
int cuMemcpyDtoHAsync_v2(void*, Pointer, size_t, Handle);
int cuMemcpyDtoD_v2(Pointer, Pointer, size_t);
int cuMemcpyDtoDAsync_v2(Pointer, Pointer, size_t, Handle);
int cuMemcpyPeerAsync(Pointer, Handle, Pointer, Handle, size_t, Handle);
int cuMemsetD8_v2(Pointer, unsigned char, size_t);
int cuMemsetD8Async(Pointer, unsigned char, size_t, Handle);
int cuIpcGetMemHandle(IpcMemory*, Pointer);
int cuIpcOpenMemHandle_v2(Pointer*, IpcMemory, unsigned int);
int cuIpcCloseMemHandle(Pointer);
int cuStreamCreateWithPriority(Handle*, unsigned int, int);
int cuStreamDestroy_v2(Handle);
int cuStreamSynchronize(Handle);
int cuStreamQuery(Handle);
int cuStreamWaitEvent(Handle, Handle, unsigned int);
int cuStreamBeginCapture_v2(Handle, int);
int cuStreamEndCapture(Handle, Handle*);
int cuStreamIsCapturing(Handle, int*);
int cuEventCreate(Handle*, unsigned int);
int cuEventDestroy_v2(Handle);
int cuEventRecord(Handle, Handle);
int cuEventQuery(Handle);
int cuEventSynchronize(Handle);
int cuEventElapsedTime_v2(float*, Handle, Handle);
int cuGraphInstantiateWithFlags(Handle*, Handle, unsigned long long);
int cuGraphLaunch(Handle, Handle);
int cuGraphDestroy(Handle);
int cuGraphExecDestroy(Handle);
}

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_RUNTIME_DRIVER_API_H_
