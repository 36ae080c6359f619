// SPDX-License-Identifier: Apache-2.0
// Memory that is created, mapped into reserved addresses, and given to other processes by
// descriptors.
#include "virtual_memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <map>

#include "call.h"
#include "memory.h"
#include "settings.h"

namespace cuda_double {

// As the driver's headers lay them out.
struct Location {
  int type;
  int id;
};
struct Properties {
  int type;
  int handle_types;
  Location location;
  void* windows;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
static_assert(sizeof(Properties) == 32);
struct Access {
  Location location;
  int flags;
};
static_assert(sizeof(Access) == 12);

namespace {

constexpr int kPinned = 1, kOnDevice = 1, kPosixDescriptor = 1;

struct Memory {
  std::shared_ptr<Segment> segment;
  int device = 0;
  int references = 1;
};

Handles<Memory>& Memories() {
  static auto* memories = new Handles<Memory>(0xD0);
  return *memories;
}

struct Reservations {
  std::mutex mutex;
  std::map<Pointer, size_t> sizes;
};

Reservations& TheReservations() {
  static auto* reservations = new Reservations;
  return *reservations;
}

void RequireSupport(int device) {
  Require(DeviceAttribute(102, device) != 0, kNotSupported, "the device has no virtual memory");
}

void CheckProperties(const Properties& properties) {
  Require(properties.type == kPinned, kInvalidValue, "type of the allocation");
  Require(properties.location.type == kOnDevice, kNotSupported,
          "the double has virtual memory on devices only");
  RequireDevice(properties.location.id);
  RequireSupport(properties.location.id);
  Require((properties.handle_types & ~kPosixDescriptor) == 0, kNotSupported,
          "the double has handles that are descriptors only");
  Require(properties.handle_types == 0 || DeviceAttribute(103, properties.location.id) != 0,
          kNotSupported, "the device has no handles that are descriptors");
}

bool Whole(size_t bytes) { return bytes > 0 && bytes % TheSettings().granularity == 0; }

bool IsReserved(Pointer pointer, size_t bytes) {
  Reservations& reservations = TheReservations();
  std::lock_guard<std::mutex> lock(reservations.mutex);
  auto after = reservations.sizes.upper_bound(pointer);
  if (after == reservations.sizes.begin()) return false;
  auto [base, size] = *std::prev(after);
  return pointer + bytes <= base + size;
}

// Calls `visit` with each mapped range of [pointer, pointer + bytes), which has to be whole ranges.
template <class F>
void ForEachMapped(Pointer pointer, size_t bytes, F&& visit) {
  auto& ranges = TheSpace().ranges;
  for (Pointer at = pointer; at < pointer + bytes;) {
    auto found = ranges.find(at);
    Require(found != ranges.end() && found->second.kind == Kind::kMapped &&
                at + found->second.size <= pointer + bytes,
            kInvalidValue, "addresses that are not mapped, or part of a mapping");
    at += found->second.size;
  }
  for (Pointer at = pointer; at < pointer + bytes;) {
    size_t size = ranges.at(at).size;
    visit(ranges.at(at));
    at += size;
  }
}

void Map(Context& context, Pointer pointer, size_t bytes, size_t offset, Handle handle) {
  std::shared_ptr<Memory> memory = Memories().Get(handle, "no memory handle", kInvalidValue);
  Require(Whole(bytes) && pointer % TheSettings().granularity == 0, kInvalidValue,
          "not a multiple of the granularity");
  Require(offset == 0, kInvalidValue, "the offset must be 0");
  Require(bytes <= memory->segment->bytes(), kInvalidValue, "more than the memory has");
  Require(IsReserved(pointer, bytes), kInvalidValue, "addresses that are not reserved");
  std::lock_guard<std::mutex> lock(TheSpace().mutex);
  auto& ranges = TheSpace().ranges;
  auto next = ranges.lower_bound(pointer);
  Require(FindRange(pointer) == nullptr &&
              (next == ranges.end() || next->second.base >= pointer + bytes),
          kAlreadyMapped, "part of it is mapped already");
  MapSegment(pointer, bytes, *memory->segment, 0, PROT_NONE);
  Range range;
  range.base = range.mapping = pointer;
  range.size = range.mapped = bytes;
  range.kind = Kind::kMapped;
  range.context = &context;
  range.device = memory->device;
  range.segment = memory->segment;
  range.access = 0;
  range.memory = handle;
  range.id = NextId();
  ranges[pointer] = range;
}

}  // namespace

size_t MemoryHandles() { return Memories().size(); }

size_t ReservedRanges() {
  std::lock_guard<std::mutex> lock(TheReservations().mutex);
  return TheReservations().sizes.size();
}

}  // namespace cuda_double

using namespace cuda_double;

CUDA_DOUBLE_API int cuMemGetAllocationGranularity(size_t* granularity, const Properties* properties,
                                                  int option) {
  return Call("cuMemGetAllocationGranularity", Needs::kInit, [&] {
    Require(option == 0 || option == 1, kInvalidValue, "no such option");
    CheckProperties(*properties);
    *granularity = TheSettings().granularity;
  });
}

CUDA_DOUBLE_API int cuMemAddressReserve(Pointer* pointer, size_t bytes, size_t alignment,
                                        Pointer address, unsigned long long flags) {
  return Call("cuMemAddressReserve", Needs::kInit, [&] {
    Require(Whole(bytes), kInvalidValue, "not a multiple of the granularity");
    Require(flags == 0 && (alignment & (alignment - 1)) == 0, kInvalidValue,
            "flags, or an alignment that is no power of two");
    (void)address;  // a wish only
    size_t granularity = TheSettings().granularity;
    *pointer = ReserveAddresses(bytes, alignment > granularity ? alignment : granularity);
    std::lock_guard<std::mutex> lock(TheReservations().mutex);
    TheReservations().sizes[*pointer] = bytes;
  });
}

CUDA_DOUBLE_API int cuMemAddressFree(Pointer pointer, size_t bytes) {
  return Call("cuMemAddressFree", Needs::kInit, [&] {
    {
      std::lock_guard<std::mutex> lock(TheSpace().mutex);
      auto next = TheSpace().ranges.lower_bound(pointer);
      Require(next == TheSpace().ranges.end() || next->second.base >= pointer + bytes,
              kInvalidValue, "something is mapped there still");
    }
    std::lock_guard<std::mutex> lock(TheReservations().mutex);
    auto& sizes = TheReservations().sizes;
    auto found = sizes.find(pointer);
    Require(found != sizes.end() && found->second == bytes, kInvalidValue,
            "not what cuMemAddressReserve gave");
    sizes.erase(found);
  });
}

CUDA_DOUBLE_API int cuMemCreate(Handle* handle, size_t bytes, const Properties* properties,
                                unsigned long long flags) {
  return Call("cuMemCreate", Needs::kInit, [&] {
    Require(flags == 0, kInvalidValue, "flags of cuMemCreate");
    CheckProperties(*properties);
    Require(Whole(bytes), kInvalidValue, "not a multiple of the granularity");
    int device = properties->location.id;
    auto memory = std::make_shared<Memory>();
    memory->segment =
        std::make_shared<Segment>(PrimaryContext(device), bytes, properties->handle_types);
    memory->device = device;
    *handle = Memories().Add(memory);
  });
}

CUDA_DOUBLE_API int cuMemRelease(Handle handle) {
  return Call("cuMemRelease", Needs::kInit, [&] {
    std::shared_ptr<Memory> memory = Memories().Get(handle, "no memory handle", kInvalidValue);
    if (--memory->references == 0) Memories().Remove(handle);
  });
}

CUDA_DOUBLE_API int cuMemRetainAllocationHandle(Handle* handle, void* address) {
  return Call("cuMemRetainAllocationHandle", Needs::kInit, [&] {
    std::lock_guard<std::mutex> lock(TheSpace().mutex);
    Range* range = FindRange(reinterpret_cast<Pointer>(address));
    Require(range != nullptr && range->kind == Kind::kMapped, kInvalidValue, "nothing is mapped");
    std::shared_ptr<Memory> memory = Memories().Find(range->memory);
    if (memory != nullptr) {
      ++memory->references;
    } else {
      memory = std::make_shared<Memory>();
      memory->segment = range->segment;
      memory->device = range->device;
      range->memory = Memories().Add(memory);
    }
    *handle = range->memory;
  });
}

CUDA_DOUBLE_API int cuMemGetAllocationPropertiesFromHandle(Properties* properties, Handle handle) {
  return Call("cuMemGetAllocationPropertiesFromHandle", Needs::kInit, [&] {
    std::shared_ptr<Memory> memory = Memories().Get(handle, "no memory handle", kInvalidValue);
    *properties = Properties{};
    properties->type = kPinned;
    properties->handle_types = memory->segment->header().handle_types;
    properties->location = Location{kOnDevice, memory->device};
  });
}

CUDA_DOUBLE_API int cuMemMap(Pointer pointer, size_t bytes, size_t offset, Handle handle,
                             unsigned long long flags) {
  return Call("cuMemMap", Needs::kInit, [&] {
    Require(flags == 0, kInvalidValue, "flags of cuMemMap");
    Map(PrimaryContext(0), pointer, bytes, offset, handle);
  });
}

CUDA_DOUBLE_API int cuMemUnmap(Pointer pointer, size_t bytes) {
  return Call("cuMemUnmap", Needs::kInit, [&] {
    std::lock_guard<std::mutex> lock(TheSpace().mutex);
    ForEachMapped(pointer, bytes, [](Range& range) {
      Unmap(range.mapping, range.mapped);
      Range gone = range;  // keeps the segment until the range is out of the map
      TheSpace().ranges.erase(gone.base);
    });
  });
}

CUDA_DOUBLE_API int cuMemSetAccess(Pointer pointer, size_t bytes, const Access* access,
                                   size_t count) {
  return Call("cuMemSetAccess", Needs::kInit, [&] {
    int widest = 0;
    std::lock_guard<std::mutex> lock(TheSpace().mutex);
    for (size_t i = 0; i < count; ++i) {
      Require(access[i].location.type == kOnDevice, kNotSupported, "access of a device only");
      RequireDevice(access[i].location.id);
      Require(access[i].flags == 0 || access[i].flags == 1 || access[i].flags == 3, kInvalidValue,
              "no such access");
      ForEachMapped(pointer, bytes, [&](Range& range) {
        int device = access[i].location.id;
        Require(device == range.device || CanAccessPeer(device, range.device), kInvalidDevice,
                "this device cannot access that one's memory");
      });
      widest |= access[i].flags;
    }
    ForEachMapped(pointer, bytes, [&](Range& range) {
      range.access = widest;
      Protect(range);
    });
  });
}

CUDA_DOUBLE_API int cuMemGetAccess(unsigned long long* flags, const Location* location,
                                   Pointer pointer) {
  return Call("cuMemGetAccess", Needs::kInit, [&] {
    Require(location->type == kOnDevice, kNotSupported, "access of a device only");
    std::lock_guard<std::mutex> lock(TheSpace().mutex);
    Range* range = FindRange(pointer);
    Require(range != nullptr && range->kind == Kind::kMapped, kInvalidValue, "nothing is mapped");
    *flags = range->access;
  });
}

CUDA_DOUBLE_API int cuMemExportToShareableHandle(void* out, Handle handle, int type,
                                                 unsigned long long flags) {
  return Call("cuMemExportToShareableHandle", Needs::kInit, [&] {
    std::shared_ptr<Memory> memory = Memories().Get(handle, "no memory handle", kInvalidValue);
    Require(type == kPosixDescriptor && flags == 0, kInvalidValue, "type of the handle");
    Require((memory->segment->header().handle_types & type) != 0, kInvalidValue,
            "the memory was not created for such handles");
    int fd = fcntl(memory->segment->fd(), F_DUPFD_CLOEXEC, 3);
    Require(fd >= 0, kOperatingSystem, "no more descriptors");
    *static_cast<int*>(out) = fd;
  });
}

CUDA_DOUBLE_API int cuMemImportFromShareableHandle(Handle* handle, void* shareable, int type) {
  return Call("cuMemImportFromShareableHandle", Needs::kInit, [&] {
    Require(type == kPosixDescriptor, kInvalidValue, "type of the handle");
    int fd = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
    auto memory = std::make_shared<Memory>();
    memory->segment = std::make_shared<Segment>(fd, kInvalidValue);
    Require((memory->segment->header().handle_types & type) != 0, kInvalidValue,
            "the memory was not created for such handles");
    memory->device = memory->segment->device();
    RequireSupport(memory->device);
    *handle = Memories().Add(memory);
  });
}
