// SPDX-License-Identifier: Apache-2.0
// Streams and events of the API.
#include "stream.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "call.h"
#include "memory.h"

namespace cuda_double {

Handles<Stream>& Streams() {
  static auto* streams = new Handles<Stream>(0x51);
  return *streams;
}

Handles<Event>& Events() {
  static auto* events = new Handles<Event>(0xE7);
  return *events;
}

std::shared_ptr<Stream> LiveStream(Handle handle) {
  std::shared_ptr<Stream> stream = Streams().Find(handle);
  if (stream == nullptr) {
    std::fprintf(stderr,
                 "cuda double: stream %#llx does not exist, or was destroyed; drivers crash\n",
                 static_cast<unsigned long long>(handle));
    std::abort();
  }
  return stream;
}

std::shared_ptr<Stream> StreamOf(Context& context, Handle handle) {
  if (handle <= 1) {
    std::shared_ptr<Stream> legacy;
    {
      static std::mutex once;
      std::lock_guard<std::mutex> lock(once);
      {
        std::lock_guard<std::mutex> context_lock(context.mutex);
        legacy = context.legacy;
      }
      if (legacy == nullptr) legacy = NewStream(context, true, true);
    }
    return legacy;
  }
  if (handle == 2) {
    static thread_local auto* of_thread = new std::map<Context*, std::shared_ptr<Stream>>;
    std::shared_ptr<Stream>& stream = (*of_thread)[&context];  // never freed, like the contexts
    if (stream == nullptr) {
      stream = NewStream(context, true);
      Streams().Remove(stream->handle);  // no handle of its own, and no leak
    }
    return stream;
  }
  std::shared_ptr<Stream> stream = LiveStream(handle);
  Require(stream->context == &context, kInvalidHandle, "a stream of another context");
  return stream;
}

}  // namespace cuda_double

using namespace cuda_double;

CUDA_DOUBLE_API int cuStreamCreateWithPriority(Handle* handle, unsigned int flags, int priority) {
  return Call("cuStreamCreate", Needs::kContext, [&](Context& context) {
    Require(flags <= 1, kInvalidValue, "flags of cuStreamCreate");
    std::shared_ptr<Stream> stream = NewStream(context, flags == 0);
    stream->priority = priority;
    *handle = stream->handle;
  });
}

CUDA_DOUBLE_API int cuStreamCreate(Handle* handle, unsigned int flags) {
  return cuStreamCreateWithPriority(handle, flags, 0);
}

CUDA_DOUBLE_API int cuStreamDestroy_v2(Handle handle) {
  return Call("cuStreamDestroy", Needs::kContext, [&](Context&) {
    Require(handle > 2, kInvalidHandle, "a default stream");
    Close(*Streams().Remove(handle));
  });
}

CUDA_DOUBLE_API int cuStreamSynchronize(Handle handle) {
  int result = Call("cuStreamSynchronize", Needs::kContext,
                    [&](Context& context) { WaitForStream(*StreamOf(context, handle)); });
  return result == kSuccess ? Call("cuStreamSynchronize (faults)", Needs::kContext, [] {}) : result;
}

CUDA_DOUBLE_API int cuStreamQuery(Handle handle) {
  return Call("cuStreamQuery", Needs::kContext, [&](Context& context) {
    std::shared_ptr<Stream> stream = StreamOf(context, handle);
    bool invalid = false;
    uint64_t id = 0;
    Require(!IsCapturing(*stream, &invalid, &id), kCaptureUnsupported, "the stream is captured");
    Require(IsIdle(*stream), kNotReady, "work is left");
  });
}

CUDA_DOUBLE_API int cuStreamGetFlags(Handle handle, unsigned int* flags) {
  return Call("cuStreamGetFlags", Needs::kContext,
              [&](Context& context) { *flags = StreamOf(context, handle)->blocking ? 0 : 1; });
}

CUDA_DOUBLE_API int cuStreamGetPriority(Handle handle, int* priority) {
  return Call("cuStreamGetPriority", Needs::kContext,
              [&](Context& context) { *priority = StreamOf(context, handle)->priority; });
}

CUDA_DOUBLE_API int cuStreamGetCtx(Handle handle, Handle* out) {
  return Call("cuStreamGetCtx", Needs::kContext, [&](Context& context) {
    *out = handle <= 2 ? context.handle : LiveStream(handle)->context->handle;
  });
}

CUDA_DOUBLE_API int cuStreamWaitEvent(Handle stream, Handle event, unsigned int flags) {
  return Call("cuStreamWaitEvent", Needs::kContext, [&](Context& context) {
    Require(flags <= 1, kInvalidValue, "flags of cuStreamWaitEvent");
    std::shared_ptr<Event> found = Events().Get(event);
    // A stream of another context may wait: ordering between devices.
    std::shared_ptr<Stream> waits = stream <= 2 ? StreamOf(context, stream) : LiveStream(stream);
    WaitEvent(*waits, found);
  });
}

CUDA_DOUBLE_API int cuLaunchHostFunc(Handle stream, void (*function)(void*), void* data) {
  return Call("cuLaunchHostFunc", Needs::kContext, [&](Context& context) {
    Require(function != nullptr, kInvalidValue, "no function");
    Submit(*StreamOf(context, stream), [function, data](GridRunner&) {
      in_host_function = true;
      function(data);
      in_host_function = false;
    });
  });
}

namespace {

template <class T>
int WriteValue(const char* name, Handle stream, Pointer at, T value) {
  return Call(name, Needs::kContext, [&](Context& context) {
    Require(at % sizeof(T) == 0, kInvalidValue, "not aligned");
    RequireDeviceMemory(at, sizeof(T));
    Submit(*StreamOf(context, stream), [at, value](GridRunner& runner) {
      runner.RunGuarded(
          [&] { __atomic_store_n(reinterpret_cast<T*>(at), value, __ATOMIC_RELEASE); });
    });
  });
}

template <class T>
bool Holds(T found, T value, unsigned int how) {
  using Signed = std::make_signed_t<T>;
  switch (how & 3) {
    case 0:
      return static_cast<Signed>(found - value) >= 0;
    case 1:
      return found == value;
    case 2:
      return (found & value) != 0;
    default:
      return static_cast<T>(~(found | value)) != 0;
  }
}

template <class T>
int WaitValue(const char* name, Handle stream, Pointer at, T value, unsigned int how) {
  return Call(name, Needs::kContext, [&](Context& context) {
    Require(at % sizeof(T) == 0, kInvalidValue, "not aligned");
    RequireDeviceMemory(at, sizeof(T));
    Submit(*StreamOf(context, stream), [at, value, how](GridRunner& runner) {
      for (bool holds = false; !holds;) {
        runner.RunGuarded([&] {
          holds = Holds(__atomic_load_n(reinterpret_cast<T*>(at), __ATOMIC_ACQUIRE), value, how);
        });
        if (!holds) usleep(20);
      }
    });
  });
}

}  // namespace

CUDA_DOUBLE_API int cuStreamWriteValue32_v2(Handle s, Pointer at, uint32_t value, unsigned int) {
  return WriteValue("cuStreamWriteValue32", s, at, value);
}
CUDA_DOUBLE_API int cuStreamWriteValue64_v2(Handle s, Pointer at, uint64_t value, unsigned int) {
  return WriteValue("cuStreamWriteValue64", s, at, value);
}
CUDA_DOUBLE_API int cuStreamWaitValue32_v2(Handle s, Pointer at, uint32_t value, unsigned int how) {
  return WaitValue("cuStreamWaitValue32", s, at, value, how);
}
CUDA_DOUBLE_API int cuStreamWaitValue64_v2(Handle s, Pointer at, uint64_t value, unsigned int how) {
  return WaitValue("cuStreamWaitValue64", s, at, value, how);
}

CUDA_DOUBLE_API int cuEventCreate(Handle* handle, unsigned int flags) {
  return Call("cuEventCreate", Needs::kContext, [&](Context& context) {
    Require(flags < 8, kInvalidValue, "flags of cuEventCreate");
    Require((flags & 4) == 0 || (flags & 2) != 0, kInvalidValue,
            "an event of several processes must not take time");
    Require((flags & 4) == 0, kNotSupported, "the double has no events of several processes");
    auto event = std::make_shared<Event>();
    event->timed = (flags & 2) == 0;
    event->blocking_sync = (flags & 1) != 0;
    event->context = &context;
    *handle = Events().Add(event);
  });
}

CUDA_DOUBLE_API int cuEventDestroy_v2(Handle handle) {
  return Call("cuEventDestroy", Needs::kContext, [&](Context&) { Events().Remove(handle); });
}

CUDA_DOUBLE_API int cuEventRecord(Handle handle, Handle stream) {
  return Call("cuEventRecord", Needs::kContext, [&](Context& context) {
    std::shared_ptr<Event> event = Events().Get(handle);
    Require(event->context == &context, kInvalidHandle, "an event of another context");
    Record(*event, *StreamOf(context, stream));
  });
}

CUDA_DOUBLE_API int cuEventRecordWithFlags(Handle handle, Handle stream, unsigned int flags) {
  return flags == 0 ? cuEventRecord(handle, stream) : int{kNotSupported};
}

CUDA_DOUBLE_API int cuEventQuery(Handle handle) {
  return Call("cuEventQuery", Needs::kUnsafe, [&](Context&) {
    Require(IsDone(Recorded(*Events().Get(handle))), kNotReady, "not yet");
  });
}

CUDA_DOUBLE_API int cuEventSynchronize(Handle handle) {
  int result = Call("cuEventSynchronize", Needs::kUnsafe,
                    [&](Context&) { WaitFor(Recorded(*Events().Get(handle))); });
  return result == kSuccess ? Call("cuEventSynchronize (faults)", Needs::kContext, [] {}) : result;
}

CUDA_DOUBLE_API int cuEventElapsedTime_v2(float* milliseconds, Handle start, Handle end) {
  return Call("cuEventElapsedTime", Needs::kContext, [&](Context&) {
    std::shared_ptr<Event> first = Events().Get(start), last = Events().Get(end);
    Require(first->timed && last->timed, kInvalidHandle, "an event that does not take the time");
    std::shared_ptr<Operation> from = Recorded(*first), to = Recorded(*last);
    Require(from != nullptr && to != nullptr, kInvalidHandle, "an event that was not recorded");
    Require(IsDone(from) && IsDone(to), kNotReady, "not yet");
    *milliseconds = static_cast<float>(1e3 * (to->finished - from->finished));
  });
}
CUDA_DOUBLE_API int cuEventElapsedTime(float* milliseconds, Handle start, Handle end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}
