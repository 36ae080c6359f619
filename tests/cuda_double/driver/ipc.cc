// SPDX-License-Identifier: Apache-2.0
// Handles of memory that cuMemAlloc gave, as bytes. The file is opened through /proc.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "call.h"
#include "memory.h"
#include "stream.h"

namespace cuda_double {

struct IpcHandle {
  union {
    struct {
      uint64_t magic;
      uint64_t id;  // of the segment
      int32_t process;
      int32_t fd;
      uint64_t offset;  // of the allocation in the segment
      uint64_t size;
    };
    char bytes[64];
  };
};
static_assert(sizeof(IpcHandle) == 64);

namespace {

constexpr uint64_t kMagic = 0x544956434950432e;

void AddImporter(Segment& segment, int process, bool add) {
  for (auto& importer : segment.header().importers) {
    int32_t expected = add ? 0 : process;
    if (importer.compare_exchange_strong(expected, add ? process : 0)) return;
  }
}

Pointer Open(Context& context, const IpcHandle& handle) {
  Require(handle.magic == kMagic, kInvalidValue, "bytes that are no handle of memory");
  Require(handle.process != getpid(), kInvalidContext, "a handle of this very process");
  {
    std::lock_guard<std::mutex> lock(TheSpace().mutex);
    for (auto& [base, range] : TheSpace().ranges) {
      if (range.kind == Kind::kImported && range.segment->header().id == handle.id) {
        ++range.opened;
        return base;
      }
    }
  }
  std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.fd);
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  Require(fd >= 0, kInvalidValue, "a handle of a process that has ended, or freed the memory");
  std::shared_ptr<Segment> segment;
  try {
    segment = std::make_shared<Segment>(fd, kInvalidValue);
  } catch (const Failure&) {
    close(fd);
    throw;
  }
  close(fd);
  Require(segment->header().id == handle.id, kInvalidValue, "a handle of memory that was freed");
  Range range;
  range.device = segment->device();
  Require(range.device == context.device || CanAccessPeer(context.device, range.device),
          kPeerUnsupported, "this device cannot access that one's memory");
  range.mapped = segment->bytes();
  range.mapping = ReserveAddresses(range.mapped, kPage);
  range.base = range.mapping + handle.offset;
  range.size = handle.size;
  range.kind = Kind::kImported;
  range.context = &context;
  range.segment = segment;
  range.id = NextId();
  MapSegment(range.mapping, range.mapped, *segment, 0, PROT_READ | PROT_WRITE);
  AddImporter(*segment, getpid(), true);
  std::lock_guard<std::mutex> lock(TheSpace().mutex);
  TheSpace().ranges[range.base] = range;
  Protect(range);
  return range.base;
}

}  // namespace
}  // namespace cuda_double

using namespace cuda_double;

CUDA_DOUBLE_API int cuIpcGetMemHandle(IpcHandle* handle, Pointer pointer) {
  return Call("cuIpcGetMemHandle", Needs::kContext, [&](Context&) {
    std::lock_guard<std::mutex> lock(TheSpace().mutex);
    Range* range = FindRange(pointer);
    Require(range != nullptr && range->kind == Kind::kDevice, kInvalidValue,
            "memory that cuMemAlloc did not give");
    std::memset(handle, 0, sizeof(*handle));
    handle->magic = kMagic;
    handle->id = range->segment->header().id;
    handle->process = getpid();
    handle->fd = range->segment->fd();
    handle->offset = range->base - range->mapping;
    handle->size = range->size;
  });
}

CUDA_DOUBLE_API int cuIpcOpenMemHandle_v2(Pointer* pointer, IpcHandle handle, unsigned int flags) {
  return Call("cuIpcOpenMemHandle", Needs::kUnsafe, [&](Context& context) {
    Require(flags == 1, kInvalidValue, "flags of cuIpcOpenMemHandle: 1, lazy peer access");
    *pointer = Open(context, handle);
  });
}

CUDA_DOUBLE_API int cuIpcCloseMemHandle(Pointer pointer) {
  return Call("cuIpcCloseMemHandle", Needs::kUnsafe, [&](Context&) {
    WaitForDevices();
    Range range;
    {
      std::lock_guard<std::mutex> lock(TheSpace().mutex);
      auto found = TheSpace().ranges.find(pointer);
      Require(found != TheSpace().ranges.end() && found->second.kind == Kind::kImported,
              kInvalidValue, "memory that cuIpcOpenMemHandle did not give");
      if (--found->second.opened > 0) return;
      range = found->second;
      TheSpace().ranges.erase(found);
    }
    AddImporter(*range.segment, getpid(), false);
    Unmap(range.mapping, range.mapped);
  });
}
