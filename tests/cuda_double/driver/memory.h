// SPDX-License-Identifier: Apache-2.0
// Memory of devices: files without a name, mapped where nothing else ever was or will be, so that
// what is used after it was freed, or past its end, is not there.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_MEMORY_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "context.h"
#include "handles.h"

namespace cuda_double {

using Pointer = uint64_t;  // CUdeviceptr

constexpr size_t kPage = 4096;

// Begins the file of a segment; the data follows at kPage.
struct SegmentHeader {
  uint64_t magic;
  uint64_t id;
  uint64_t bytes;
  int32_t physical;  // device
  int32_t handle_types;
  std::atomic<int32_t> importers[64];  // processes that mapped it by a legacy handle
};

class Segment {
 public:
  // Takes `bytes` of the device's memory, filled with poison.
  Segment(Context& context, size_t bytes, int handle_types);
  // Of another process, or this one; throws if it is none.
  Segment(int fd, Result otherwise);
  ~Segment();
  Segment(const Segment&) = delete;

  int fd() const { return fd_; }
  size_t bytes() const { return header_->bytes; }
  SegmentHeader& header() { return *header_; }
  int device() const;  // as this process counts them; throws if it does not see it

 private:
  int fd_ = -1;
  SegmentHeader* header_ = nullptr;
  Context* charged_ = nullptr;
};

enum class Kind { kDevice, kImported, kMapped, kHost, kRegistered };

struct Range {
  Pointer base = 0;
  size_t size = 0;
  Kind kind = Kind::kDevice;
  Context* context = nullptr;
  int device = 0;  // where the memory is
  std::shared_ptr<Segment> segment;
  Pointer mapping = 0;  // what is mapped: whole pages
  size_t mapped = 0;
  int access = 3;     // of a kMapped range: 0, 1 read, 3 write
  Handle memory = 0;  // of a kMapped range
  int opened = 1;     // of a kImported one: how often
  uint64_t id = 0;    // no two allocations have the same
  unsigned int flags = 0;
};

struct Space {
  std::mutex mutex;
  std::map<Pointer, Range> ranges;  // by their first byte
  int touching = 0;                 // how many Touch there are
};

// While there is one, memory of devices is there. Without TVM_IPC_DOUBLE_GUARD it always is.
class Touch {
 public:
  Touch();
  ~Touch();
  Touch(const Touch&) = delete;
};
// Whether an address is one of those that memory of devices has, for what catches faults.
bool IsOfDevices(const void* address);

Space& TheSpace();
uint64_t NextId();

// Addresses that were never used, with a page before and behind that is never mapped.
Pointer ReserveAddresses(size_t bytes, size_t alignment);
void MapSegment(Pointer at, size_t bytes, const Segment& segment, size_t offset, int protection);
void Unmap(Pointer at, size_t bytes);  // keeps the addresses
// Gives a range the protection that it is to have now. With the space's mutex held.
void Protect(const Range& range);

// The range that holds the address, or null. With the space's mutex held.
Range* FindRange(Pointer pointer);

enum class MemoryKind { kDevice, kPinned, kPageable };
// Where memory is. Throws if it begins in a range and ends outside, or is mapped without access.
MemoryKind MemoryKindOf(const void* pointer, size_t bytes);
void RequireDeviceMemory(Pointer pointer, size_t bytes);

void ChargeMemory(Context& context, size_t bytes);  // throws kOutOfMemory

std::vector<std::pair<const char*, size_t>> LeakedMemory();

}  // namespace cuda_double

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_MEMORY_H_
