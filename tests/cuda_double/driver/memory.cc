// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "call.h"
#include "settings.h"
#include "virtual_memory.h"

namespace cuda_double {
namespace {

constexpr uint64_t kMagic = 0x544956434d454d31;
/*! \brief So few that ThreadSanitizer has room for them. */
constexpr size_t kAddresses = size_t{1} << 39;

void* Address(Pointer pointer) { return reinterpret_cast<void*>(pointer); }

struct Addresses {
  std::mutex mutex;
  Pointer next = 0;
  Pointer end = 0;
};

Addresses& TheAddresses() {
  static auto* addresses = [] {
    auto* made = new Addresses;
    void* memory =
        mmap(nullptr, kAddresses, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      std::perror("cuda double: addresses for the memory of devices");
      std::abort();
    }
    // Elsewhere in each process: an address of one is no good in another.
    made->next = reinterpret_cast<Pointer>(memory) + (getpid() % 4096 + 1) * (size_t{64} << 20);
    made->end = reinterpret_cast<Pointer>(memory) + kAddresses;
    return made;
  }();
  return *addresses;
}

}  // namespace

Space& TheSpace() {
  static auto* space = new Space;
  return *space;
}

uint64_t NextId() {
  static std::atomic<uint64_t> next{1};
  return next++;
}

void ChargeMemory(Context& context, size_t bytes) {
  size_t used = context.used.fetch_add(bytes) + bytes;
  if (used > TheSettings().memory) {
    context.used -= bytes;
    throw Failure{kOutOfMemory, "the device has no more memory"};
  }
}

Segment::Segment(Context& context, size_t bytes, int handle_types) : charged_(&context) {
  ChargeMemory(context, bytes);
  fd_ = memfd_create("tvm_ipc cuda double", MFD_CLOEXEC);
  void* memory = MAP_FAILED;
  if (fd_ >= 0 && ftruncate(fd_, static_cast<off_t>(kPage + bytes)) == 0) {
    memory = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  }
  if (memory == MAP_FAILED) {
    context.used -= bytes;
    throw Failure{kOutOfMemory, std::string("a file of memory: ") + std::strerror(errno)};
  }
  header_ = static_cast<SegmentHeader*>(memory);
  std::random_device random;
  header_->magic = kMagic;
  header_->id = (uint64_t{random()} << 32) | random();
  header_->bytes = bytes;
  header_->physical = context.physical;
  header_->handle_types = handle_types;
  int poison = TheSettings().poison;
  if (poison > 0) {
    std::vector<char> page(size_t{64} << 10, static_cast<char>(poison));
    size_t end = std::min(bytes, TheSettings().poison_limit);
    for (size_t at = 0; at < end; at += page.size()) {
      size_t piece = std::min(page.size(), end - at);
      if (pwrite(fd_, page.data(), piece, static_cast<off_t>(kPage + at)) < 0) break;
    }
  }
}

Segment::Segment(int fd, Result otherwise) {
  struct stat status{};
  if (fstat(fd, &status) != 0 || static_cast<size_t>(status.st_size) < kPage) {
    throw Failure{otherwise, "not a file of device memory"};
  }
  fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  void* memory = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (memory == MAP_FAILED || static_cast<SegmentHeader*>(memory)->magic != kMagic) {
    if (memory != MAP_FAILED) munmap(memory, kPage);
    close(fd_);
    throw Failure{otherwise, "not a file of device memory"};
  }
  header_ = static_cast<SegmentHeader*>(memory);
}

Segment::~Segment() {
  if (charged_ != nullptr) charged_->used -= header_->bytes;
  munmap(header_, kPage);
  close(fd_);
}

int Segment::device() const {
  const std::vector<int>& devices = TheSettings().devices;
  auto found = std::find(devices.begin(), devices.end(), header_->physical);
  Require(found != devices.end(), kInvalidDevice, "memory of a device that is not visible here");
  return static_cast<int>(found - devices.begin());
}

Pointer ReserveAddresses(size_t bytes, size_t alignment) {
  Addresses& addresses = TheAddresses();
  std::lock_guard<std::mutex> lock(addresses.mutex);
  Pointer at = (addresses.next + kPage + alignment - 1) / alignment * alignment;
  Require(at + bytes + kPage <= addresses.end, kOutOfMemory, "no more addresses");
  addresses.next = (at + bytes + kPage - 1) / kPage * kPage;
  return at;
}

void MapSegment(Pointer at, size_t bytes, const Segment& segment, size_t offset, int protection) {
  void* memory = mmap(Address(at), bytes, protection, MAP_SHARED | MAP_FIXED, segment.fd(),
                      static_cast<off_t>(kPage + offset));
  Require(memory != MAP_FAILED, kMapFailed, "mmap");
}

void Unmap(Pointer at, size_t bytes) {
  mmap(Address(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
       0);
}

void Protect(const Range& range) {
  if (range.kind == Kind::kHost || range.kind == Kind::kRegistered) return;
  int protection = range.access == 3 ? PROT_READ | PROT_WRITE : range.access == 1 ? PROT_READ : 0;
  if (TheSettings().guard && TheSpace().touching == 0) protection = PROT_NONE;
  mprotect(Address(range.mapping), range.mapped, protection);
}

Touch::Touch() {
  if (!TheSettings().guard) return;
  Space& space = TheSpace();
  std::lock_guard<std::mutex> lock(space.mutex);
  if (space.touching++ > 0) return;
  for (auto& [base, range] : space.ranges) Protect(range);
}

Touch::~Touch() {
  if (!TheSettings().guard) return;
  Space& space = TheSpace();
  std::lock_guard<std::mutex> lock(space.mutex);
  if (--space.touching > 0) return;
  for (auto& [base, range] : space.ranges) Protect(range);
}

bool IsOfDevices(const void* address) {
  auto at = reinterpret_cast<Pointer>(address);
  return at < TheAddresses().end && at >= TheAddresses().end - kAddresses;
}

Range* FindRange(Pointer pointer) {
  auto& ranges = TheSpace().ranges;
  auto after = ranges.upper_bound(pointer);
  if (after == ranges.begin()) return nullptr;
  Range& range = std::prev(after)->second;
  return pointer < range.base + range.size ? &range : nullptr;
}

MemoryKind MemoryKindOf(const void* pointer, size_t bytes) {
  std::lock_guard<std::mutex> lock(TheSpace().mutex);
  auto at = reinterpret_cast<Pointer>(pointer);
  Range* range = FindRange(at);
  if (range == nullptr) {
    Addresses& addresses = TheAddresses();
    Require(at < addresses.end - kAddresses || at >= addresses.end, kInvalidValue,
            "memory of a device that was freed, or never allocated");
    return MemoryKind::kPageable;
  }
  bool pinned = range->kind == Kind::kHost || range->kind == Kind::kRegistered;
  Pointer end = at + bytes;
  while (true) {
    Require(pinned || range->access == 3, kInvalidValue, "memory that is mapped without access");
    if (end <= range->base + range->size) break;
    Range* next = range->kind == Kind::kMapped ? FindRange(range->base + range->size) : nullptr;
    if (next == nullptr && range->kind == Kind::kRegistered) return MemoryKind::kPageable;
    Require(next != nullptr, kInvalidValue, "more bytes than the allocation has");
    range = next;
  }
  return pinned ? MemoryKind::kPinned : MemoryKind::kDevice;
}

void RequireDeviceMemory(Pointer pointer, size_t bytes) {
  if (bytes == 0) return;
  Require(MemoryKindOf(Address(pointer), bytes) != MemoryKind::kPageable, kInvalidValue,
          "a pointer that is not one of the device");
}

std::vector<std::pair<const char*, size_t>> LeakedMemory() {
  std::lock_guard<std::mutex> lock(TheSpace().mutex);
  size_t counts[5] = {};
  for (auto& [base, range] : TheSpace().ranges) ++counts[static_cast<int>(range.kind)];
  return {{"allocation", counts[0]},           {"opened handle of other processes", counts[1]},
          {"mapped range", counts[2]},         {"pinned allocation", counts[3]},
          {"registered range", counts[4]},     {"memory handle", MemoryHandles()},
          {"reserved range", ReservedRanges()}};
}

}  // namespace cuda_double
