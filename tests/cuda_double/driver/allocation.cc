// SPDX-License-Identifier: Apache-2.0
// cuMemAlloc and its kin, memory of the host, and what is known of a pointer.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "call.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

namespace cuda_double {
namespace {

size_t Pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

Pointer Allocate(Context& context, size_t bytes) {
  Require(bytes > 0, kInvalidValue, "an allocation of no bytes");
  Require(bytes <= TheSettings().memory, kOutOfMemory, "more than the device has");
  size_t rounded = (bytes + 255) / 256 * 256;
  Range range;
  range.mapped = Pages(rounded);
  range.segment = std::make_shared<Segment>(context, range.mapped, 0);
  range.mapping = ReserveAddresses(range.mapped, kPage);
  // At the end of its last page: what is read or written behind it is not there.
  range.base = range.mapping + range.mapped - rounded;
  range.size = bytes;
  range.context = &context;
  range.device = context.device;
  range.id = NextId();
  MapSegment(range.mapping, range.mapped, *range.segment, 0, PROT_READ | PROT_WRITE);
  std::lock_guard<std::mutex> lock(TheSpace().mutex);
  TheSpace().ranges[range.base] = range;
  Protect(range);
  return range.base;
}

// The range that begins there, taken out.
Range Take(Pointer pointer, Kind kind, Result otherwise, const char* why) {
  std::lock_guard<std::mutex> lock(TheSpace().mutex);
  auto& ranges = TheSpace().ranges;
  auto found = ranges.find(pointer);
  Require(found != ranges.end() && found->second.kind == kind, otherwise, why);
  Range range = found->second;
  ranges.erase(found);
  return range;
}

// Between what was asked for and the next 256 bytes there is poison still.
void CheckTail(Pointer pointer) {
  int poison = TheSettings().poison;
  Touch touch;
  std::lock_guard<std::mutex> lock(TheSpace().mutex);
  Range* range = FindRange(pointer);
  if (poison < 0 || range == nullptr || range->mapped > TheSettings().poison_limit) return;
  auto* end = reinterpret_cast<const unsigned char*>(range->mapping + range->mapped);
  auto* at = reinterpret_cast<const unsigned char*>(range->base + range->size);
  if (std::all_of(at, end, [poison](unsigned char byte) { return byte == poison; })) return;
  NoteViolation("something wrote behind an allocation of " + std::to_string(range->size) +
                " bytes");
}

void Free(Pointer pointer) {
  {
    std::lock_guard<std::mutex> lock(TheSpace().mutex);
    auto found = TheSpace().ranges.find(pointer);
    Require(found != TheSpace().ranges.end() && found->second.kind == Kind::kDevice, kInvalidValue,
            "a pointer that cuMemAlloc did not give, or that was freed");
  }
  WaitForDevices();
  CheckTail(pointer);
  Range range = Take(pointer, Kind::kDevice, kInvalidValue, "freed meanwhile");
  for (auto& importer : range.segment->header().importers) {
    if (importer != 0) {
      NoteViolation("memory is freed that process " + std::to_string(importer) + " still maps");
      break;
    }
  }
  Unmap(range.mapping, range.mapped);
}

Pointer AllocateHost(Context& context, size_t bytes, unsigned int flags) {
  Require(bytes > 0, kInvalidValue, "an allocation of no bytes");
  size_t mapped = Pages(bytes);
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  Require(memory != MAP_FAILED, kOutOfMemory, "memory of the host");
  int poison = TheSettings().poison;
  std::memset(memory, poison < 0 ? 0 : poison, mapped);
  Range range;
  range.base = range.mapping = reinterpret_cast<Pointer>(memory);
  range.size = bytes;
  range.mapped = mapped;
  range.kind = Kind::kHost;
  range.context = &context;
  range.device = context.device;
  range.id = NextId();
  range.flags = flags;
  std::lock_guard<std::mutex> lock(TheSpace().mutex);
  TheSpace().ranges[range.base] = range;
  return range.base;
}

void Register(Context& context, Pointer pointer, size_t bytes, unsigned int flags) {
  Require(pointer != 0 && bytes > 0, kInvalidValue, "no memory");
  Require(flags < 16, kInvalidValue, "flags of cuMemHostRegister");
  Require((flags & 8) == 0 || DeviceAttribute(113, context.device) != 0, kNotSupported,
          "read-only memory of the host");
  std::lock_guard<std::mutex> lock(TheSpace().mutex);
  auto& ranges = TheSpace().ranges;
  auto next = ranges.lower_bound(pointer);
  bool taken = FindRange(pointer) != nullptr ||
               (next != ranges.end() && next->second.base < pointer + bytes);
  Require(!taken, kAlreadyRegistered, "part of it is registered or the driver's already");
  // A real driver pins the pages; ones that do not exist cannot be pinned.
  Pointer first = pointer / kPage * kPage;
  std::vector<unsigned char> present((pointer + bytes - first + kPage - 1) / kPage);
  Require(mincore(reinterpret_cast<void*>(first), pointer + bytes - first, present.data()) == 0,
          kInvalidValue, "memory that the process does not have");
  Range range;
  range.base = pointer;
  range.size = bytes;
  range.kind = Kind::kRegistered;
  range.context = &context;
  range.device = context.device;
  range.id = NextId();
  range.flags = flags;
  ranges[pointer] = range;
}

void PointerAttribute(void* data, int attribute, const Range& range) {
  bool host = range.kind == Kind::kHost || range.kind == Kind::kRegistered;
  switch (attribute) {
    case 1:
      *static_cast<Handle*>(data) = range.kind == Kind::kMapped ? 0 : range.context->handle;
      return;
    case 2:
      *static_cast<unsigned int*>(data) = host ? 1 : 2;
      return;
    case 6:
    case 8:  // managed
      *static_cast<unsigned int*>(data) = 0;
      return;
    case 7:
      *static_cast<uint64_t*>(data) = range.id;
      return;
    case 9:
      *static_cast<int*>(data) = range.device;
      return;
    case 10:
      *static_cast<unsigned int*>(data) = range.kind == Kind::kDevice;
      return;
    case 11:
      *static_cast<Pointer*>(data) = range.base;
      return;
    case 12:
      *static_cast<size_t*>(data) = range.size;
      return;
    case 13:
      *static_cast<unsigned int*>(data) = 1;
      return;
    case 14:
      *static_cast<uint64_t*>(data) =
          range.segment == nullptr ? 0 : range.segment->header().handle_types;
      return;
    case 16:
      *static_cast<int*>(data) = range.access;
      return;
    default:
      throw Failure{kNotSupported, "an attribute of pointers that the double does not have"};
  }
}

}  // namespace
}  // namespace cuda_double

using namespace cuda_double;

CUDA_DOUBLE_API int cuMemGetInfo_v2(size_t* free, size_t* total) {
  return Call("cuMemGetInfo", Needs::kContext, [&](Context& context) {
    *total = TheSettings().memory;
    *free = *total - context.used;
  });
}

CUDA_DOUBLE_API int cuMemAlloc_v2(Pointer* pointer, size_t bytes) {
  return Call("cuMemAlloc", Needs::kUnsafe,
              [&](Context& context) { *pointer = Allocate(context, bytes); });
}

CUDA_DOUBLE_API int cuMemFree_v2(Pointer pointer) {
  return Call("cuMemFree", Needs::kUnsafe, [&](Context&) {
    if (pointer != 0) Free(pointer);
  });
}

CUDA_DOUBLE_API int cuMemGetAddressRange_v2(Pointer* base, size_t* size, Pointer pointer) {
  return Call("cuMemGetAddressRange", Needs::kContext, [&](Context&) {
    std::lock_guard<std::mutex> lock(TheSpace().mutex);
    Range* range = FindRange(pointer);
    Require(range != nullptr, kNotFound, "no allocation");
    if (base != nullptr) *base = range->base;
    if (size != nullptr) *size = range->size;
  });
}

CUDA_DOUBLE_API int cuMemHostAlloc(void** pointer, size_t bytes, unsigned int flags) {
  return Call("cuMemHostAlloc", Needs::kUnsafe, [&](Context& context) {
    Require(flags < 8, kInvalidValue, "flags of cuMemHostAlloc");
    *pointer = reinterpret_cast<void*>(AllocateHost(context, bytes, flags));
  });
}

CUDA_DOUBLE_API int cuMemAllocHost_v2(void** pointer, size_t bytes) {
  return Call("cuMemAllocHost", Needs::kUnsafe, [&](Context& context) {
    *pointer = reinterpret_cast<void*>(AllocateHost(context, bytes, 0));
  });
}

CUDA_DOUBLE_API int cuMemFreeHost(void* pointer) {
  return Call("cuMemFreeHost", Needs::kUnsafe, [&](Context&) {
    WaitForDevices();
    Range range = Take(reinterpret_cast<Pointer>(pointer), Kind::kHost, kInvalidValue,
                       "a pointer that cuMemHostAlloc did not give, or that was freed");
    munmap(pointer, range.mapped);
  });
}

CUDA_DOUBLE_API int cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned int flags) {
  return Call("cuMemHostRegister", Needs::kUnsafe, [&](Context& context) {
    Register(context, reinterpret_cast<Pointer>(pointer), bytes, flags);
  });
}

CUDA_DOUBLE_API int cuMemHostUnregister(void* pointer) {
  return Call("cuMemHostUnregister", Needs::kUnsafe, [&](Context&) {
    WaitForDevices();
    Take(reinterpret_cast<Pointer>(pointer), Kind::kRegistered, kNotRegistered,
         "a pointer that is not registered");
  });
}

CUDA_DOUBLE_API int cuMemHostGetDevicePointer_v2(Pointer* pointer, void* host, unsigned int flags) {
  return Call("cuMemHostGetDevicePointer", Needs::kContext, [&](Context&) {
    Require(flags == 0, kInvalidValue, "flags of cuMemHostGetDevicePointer");
    std::lock_guard<std::mutex> lock(TheSpace().mutex);
    Range* range = FindRange(reinterpret_cast<Pointer>(host));
    Require(range != nullptr && (range->kind == Kind::kHost || range->kind == Kind::kRegistered),
            kInvalidValue, "memory of the host that the driver does not know");
    *pointer = reinterpret_cast<Pointer>(host);
  });
}

CUDA_DOUBLE_API int cuMemHostGetFlags(unsigned int* flags, void* host) {
  return Call("cuMemHostGetFlags", Needs::kContext, [&](Context&) {
    std::lock_guard<std::mutex> lock(TheSpace().mutex);
    Range* range = FindRange(reinterpret_cast<Pointer>(host));
    Require(range != nullptr && range->kind == Kind::kHost, kInvalidValue,
            "memory that cuMemHostAlloc did not give");
    *flags = range->flags;
  });
}

CUDA_DOUBLE_API int cuPointerGetAttribute(void* data, int attribute, Pointer pointer) {
  return Call("cuPointerGetAttribute", Needs::kInit, [&] {
    std::lock_guard<std::mutex> lock(TheSpace().mutex);
    Range* range = FindRange(pointer);
    Require(range != nullptr, kInvalidValue, "no memory that the driver knows");
    if (attribute == 3 || attribute == 4) {
      bool host = range->kind == Kind::kHost || range->kind == Kind::kRegistered;
      Require(attribute == 3 || host, kInvalidValue, "memory of a device");
      *static_cast<Pointer*>(data) = pointer;
      return;
    }
    PointerAttribute(data, attribute, *range);
  });
}
