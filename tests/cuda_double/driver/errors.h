// SPDX-License-Identifier: Apache-2.0
// The errors of the driver API. The runtime API has the same numbers.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_ERRORS_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_ERRORS_H_

#include <string>

// X(number, ours, the driver's name, the runtime's name, text)
#define CUDA_DOUBLE_ERRORS(X)                                                                      \
  X(0, kSuccess, "CUDA_SUCCESS", "cudaSuccess", "no error")                                        \
  X(1, kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "cudaErrorInvalidValue", "invalid argument")     \
  X(2, kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "out of memory")     \
  X(3, kNotInitialised, "CUDA_ERROR_NOT_INITIALIZED", "cudaErrorInitializationError",              \
    "initialization error")                                                                        \
  X(4, kDeinitialised, "CUDA_ERROR_DEINITIALIZED", "cudaErrorCudartUnloading",                     \
    "driver shutting down")                                                                        \
  X(9, kInvalidConfiguration, "CUDA_ERROR_INVALID_CONFIGURATION", "cudaErrorInvalidConfiguration", \
    "invalid configuration argument")                                                              \
  X(100, kNoDevice, "CUDA_ERROR_NO_DEVICE", "cudaErrorNoDevice",                                   \
    "no CUDA-capable device is detected")                                                          \
  X(101, kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "cudaErrorInvalidDevice",                    \
    "invalid device ordinal")                                                                      \
  X(200, kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "cudaErrorInvalidKernelImage",                 \
    "device kernel image is invalid")                                                              \
  X(201, kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "cudaErrorDeviceUninitialized",            \
    "invalid device context")                                                                      \
  X(205, kMapFailed, "CUDA_ERROR_MAP_FAILED", "cudaErrorMapBufferObjectFailed",                    \
    "mapping of buffer object failed")                                                             \
  X(208, kAlreadyMapped, "CUDA_ERROR_ALREADY_MAPPED", "cudaErrorAlreadyMapped",                    \
    "resource already mapped")                                                                     \
  X(209, kNoBinary, "CUDA_ERROR_NO_BINARY_FOR_GPU", "cudaErrorNoKernelImageForDevice",             \
    "no kernel image is available for execution on the device")                                    \
  X(211, kNotMapped, "CUDA_ERROR_NOT_MAPPED", "cudaErrorNotMapped", "resource not mapped")         \
  X(217, kPeerUnsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "cudaErrorPeerAccessUnsupported", \
    "peer access is not supported between these two devices")                                      \
  X(218, kInvalidPtx, "CUDA_ERROR_INVALID_PTX", "cudaErrorInvalidPtx",                             \
    "a PTX JIT compilation failed")                                                                \
  X(304, kOperatingSystem, "CUDA_ERROR_OPERATING_SYSTEM", "cudaErrorOperatingSystem",              \
    "OS call failed or operation not supported on this OS")                                        \
  X(400, kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "cudaErrorInvalidResourceHandle",            \
    "invalid resource handle")                                                                     \
  X(500, kNotFound, "CUDA_ERROR_NOT_FOUND", "cudaErrorSymbolNotFound", "named symbol not found")   \
  X(600, kNotReady, "CUDA_ERROR_NOT_READY", "cudaErrorNotReady", "device not ready")               \
  X(700, kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "cudaErrorIllegalAddress",                 \
    "an illegal memory access was encountered")                                                    \
  X(701, kOutOfResources, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "cudaErrorLaunchOutOfResources",   \
    "too many resources requested for launch")                                                     \
  X(702, kLaunchTimeout, "CUDA_ERROR_LAUNCH_TIMEOUT", "cudaErrorLaunchTimeout",                    \
    "the launch timed out and was terminated")                                                     \
  X(704, kPeerEnabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",                                   \
    "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled")                         \
  X(705, kPeerNotEnabled, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "cudaErrorPeerAccessNotEnabled",   \
    "peer access has not been enabled")                                                            \
  X(709, kContextDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "cudaErrorContextIsDestroyed",      \
    "context is destroyed")                                                                        \
  X(711, kTooManyPeers, "CUDA_ERROR_TOO_MANY_PEERS", "cudaErrorTooManyPeers",                      \
    "peer mapping resources exhausted")                                                            \
  X(712, kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",                          \
    "cudaErrorHostMemoryAlreadyRegistered",                                                        \
    "part or all of the requested memory range is already mapped")                                 \
  X(713, kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",                                  \
    "cudaErrorHostMemoryNotRegistered",                                                            \
    "pointer does not correspond to a registered memory region")                                   \
  X(719, kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "cudaErrorLaunchFailure",                      \
    "unspecified launch failure")                                                                  \
  X(720, kCooperativeTooLarge, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",                          \
    "cudaErrorCooperativeLaunchTooLarge", "too many blocks in cooperative launch")                 \
  X(800, kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "cudaErrorNotPermitted",                       \
    "operation not permitted")                                                                     \
  X(801, kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "cudaErrorNotSupported",                       \
    "operation not supported")                                                                     \
  X(900, kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",                             \
    "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing")       \
  X(901, kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",                             \
    "cudaErrorStreamCaptureInvalidated",                                                           \
    "operation failed due to a previous error during capture")                                     \
  X(902, kCaptureMerge, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "cudaErrorStreamCaptureMerge",          \
    "operation would result in a merge of separate capture sequences")                             \
  X(903, kCaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",                                 \
    "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began")     \
  X(904, kCaptureUnjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "cudaErrorStreamCaptureUnjoined", \
    "capturing stream has unjoined work in another stream")                                        \
  X(905, kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",                                 \
    "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream")  \
  X(906, kCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "cudaErrorStreamCaptureImplicit", \
    "operation would make the legacy stream depend on a capturing blocking stream")                \
  X(907, kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT", "cudaErrorCapturedEvent",                    \
    "operation not permitted on an event last recorded in a capturing stream")                     \
  X(908, kCaptureWrongThread, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",                            \
    "cudaErrorStreamCaptureWrongThread",                                                           \
    "attempt to terminate a thread-local capture sequence from another thread")                    \
  X(999, kUnknown, "CUDA_ERROR_UNKNOWN", "cudaErrorUnknown", "unknown error")

namespace cuda_double {

enum Result : int {
#define CUDA_DOUBLE_ERROR(number, ours, driver, runtime, text) ours = number,
  CUDA_DOUBLE_ERRORS(CUDA_DOUBLE_ERROR)
#undef CUDA_DOUBLE_ERROR
};

// Thrown inside, and turned into its code where a call ends; `why` goes to the log.
struct Failure {
  Result result;
  std::string why;
};

inline void Require(bool holds, Result result, const char* why) {
  if (!holds) throw Failure{result, why};
}

}  // namespace cuda_double

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_ERRORS_H_
