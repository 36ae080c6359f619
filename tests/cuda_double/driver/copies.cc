// SPDX-License-Identifier: Apache-2.0
// Copies and fills. As on a device: what goes to or from memory of the host that is not pinned has
// been read, or has arrived, when an asynchronous call returns; nothing else has. Synchronous ones
// go by the legacy stream, and those from device to device do not wait for it either.
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "call.h"
#include "memory.h"
#include "stream.h"

namespace cuda_double {
namespace {

void* Address(Pointer pointer) { return reinterpret_cast<void*>(pointer); }

struct CopyPlan {
  bool stage = false;  // read the source before the call returns
  bool wait = false;   // until all has arrived
};

CopyPlan Plan(Pointer to, Pointer from, size_t bytes) {
  CopyPlan plan;
  plan.stage = MemoryKindOf(Address(from), bytes) == MemoryKind::kPageable;
  plan.wait = MemoryKindOf(Address(to), bytes) == MemoryKind::kPageable;
  return plan;
}

void RequireAlive(Context& context) {
  int fault = context.fault;
  if (fault != kSuccess) throw Failure{static_cast<Result>(fault), "the device had a fault"};
}

bool Captured(Stream& stream) {
  bool invalid = false;
  uint64_t id = 0;
  return IsCapturing(stream, &invalid, &id);
}

void Copy(Context& context, Pointer to, Pointer from, size_t bytes, Stream& stream,
          bool synchronous) {
  if (bytes == 0) return;
  CopyPlan plan = Plan(to, from, bytes);
  bool captured = Captured(stream);
  std::shared_ptr<std::vector<char>> staged;
  if (plan.stage && !captured) {
    auto* source = static_cast<const char*>(Address(from));
    staged = std::make_shared<std::vector<char>>(source, source + bytes);
  }
  std::shared_ptr<Operation> operation =
      Submit(stream, [to, from, bytes, staged](GridRunner& runner) {
        runner.RunGuarded([&] {
          std::memmove(Address(to), staged != nullptr ? staged->data() : Address(from), bytes);
        });
      });
  bool between_devices = MemoryKindOf(Address(to), bytes) == MemoryKind::kDevice &&
                         MemoryKindOf(Address(from), bytes) == MemoryKind::kDevice;
  if (plan.wait || (synchronous && !between_devices)) {
    WaitFor(operation);
    RequireAlive(context);
  }
}

template <class T>
void Fill(Pointer to, T value, size_t count, Stream& stream) {
  if (count == 0) return;
  Require(to % sizeof(T) == 0, kInvalidValue, "not aligned to its elements");
  RequireDeviceMemory(to, count * sizeof(T));
  Submit(stream, [to, value, count](GridRunner& runner) {
    runner.RunGuarded([&] {
      auto* at = static_cast<T*>(Address(to));
      for (size_t i = 0; i < count; ++i) at[i] = value;
    });
  });
}

int CopyOn(const char* name, Pointer to, Pointer from, size_t bytes, Handle stream, bool to_device,
           bool from_device) {
  return Call(name, Needs::kContext, [&](Context& context) {
    if (to_device) RequireDeviceMemory(to, bytes);
    if (from_device) RequireDeviceMemory(from, bytes);
    Copy(context, to, from, bytes, *StreamOf(context, stream), false);
  });
}

int CopyNow(const char* name, Pointer to, Pointer from, size_t bytes, bool to_device,
            bool from_device) {
  return Call(name, Needs::kUnsafe, [&](Context& context) {
    if (to_device) RequireDeviceMemory(to, bytes);
    if (from_device) RequireDeviceMemory(from, bytes);
    Copy(context, to, from, bytes, *StreamOf(context, 0), true);
  });
}

}  // namespace
}  // namespace cuda_double

using namespace cuda_double;

static Pointer At(const void* pointer) { return reinterpret_cast<Pointer>(pointer); }

CUDA_DOUBLE_API int cuMemcpy(Pointer to, Pointer from, size_t bytes) {
  return CopyNow("cuMemcpy", to, from, bytes, false, false);
}
CUDA_DOUBLE_API int cuMemcpyHtoD_v2(Pointer to, const void* from, size_t bytes) {
  return CopyNow("cuMemcpyHtoD", to, At(from), bytes, true, false);
}
CUDA_DOUBLE_API int cuMemcpyDtoH_v2(void* to, Pointer from, size_t bytes) {
  return CopyNow("cuMemcpyDtoH", At(to), from, bytes, false, true);
}
CUDA_DOUBLE_API int cuMemcpyDtoD_v2(Pointer to, Pointer from, size_t bytes) {
  return CopyNow("cuMemcpyDtoD", to, from, bytes, true, true);
}
CUDA_DOUBLE_API int cuMemcpyPeer(Pointer to, Handle, Pointer from, Handle, size_t bytes) {
  return CopyNow("cuMemcpyPeer", to, from, bytes, true, true);
}

CUDA_DOUBLE_API int cuMemcpyAsync(Pointer to, Pointer from, size_t bytes, Handle stream) {
  return CopyOn("cuMemcpyAsync", to, from, bytes, stream, false, false);
}
CUDA_DOUBLE_API int cuMemcpyHtoDAsync_v2(Pointer to, const void* from, size_t bytes,
                                         Handle stream) {
  return CopyOn("cuMemcpyHtoDAsync", to, At(from), bytes, stream, true, false);
}
CUDA_DOUBLE_API int cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t bytes, Handle stream) {
  return CopyOn("cuMemcpyDtoHAsync", At(to), from, bytes, stream, false, true);
}
CUDA_DOUBLE_API int cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, Handle stream) {
  return CopyOn("cuMemcpyDtoDAsync", to, from, bytes, stream, true, true);
}
CUDA_DOUBLE_API int cuMemcpyPeerAsync(Pointer to, Handle to_context, Pointer from,
                                      Handle from_context, size_t bytes, Handle stream) {
  return Call("cuMemcpyPeerAsync", Needs::kContext, [&](Context& context) {
    ContextOf(to_context);
    ContextOf(from_context);
    RequireDeviceMemory(to, bytes);
    RequireDeviceMemory(from, bytes);
    Copy(context, to, from, bytes, *StreamOf(context, stream), false);
  });
}

#define FILL(name, type)                                                                         \
  CUDA_DOUBLE_API int name##_v2(Pointer to, type value, size_t count) {                          \
    return Call(#name, Needs::kUnsafe,                                                           \
                [&](Context& context) { Fill<type>(to, value, count, *StreamOf(context, 0)); }); \
  }                                                                                              \
  CUDA_DOUBLE_API int name##Async(Pointer to, type value, size_t count, Handle stream) {         \
    return Call(#name "Async", Needs::kContext, [&](Context& context) {                          \
      Fill<type>(to, value, count, *StreamOf(context, stream));                                  \
    });                                                                                          \
  }
FILL(cuMemsetD8, uint8_t)
FILL(cuMemsetD16, uint16_t)
FILL(cuMemsetD32, uint32_t)
#undef FILL
