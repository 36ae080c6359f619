/* SPDX-License-Identifier: Apache-2.0 */
/*! \file exportable_memory.cc */
#include "cuda/exportable_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/file_descriptor_and_memory_file.h"
#include "cuda/host_registration.h"
#include "cuda/region_layout.h"

namespace tvm_ipc::cuda {

namespace {

using Count = std::shared_ptr<std::atomic<int32_t>>;

/*! \brief How long the destructor of memory waits for ranks that still map it. */
constexpr std::chrono::seconds kLastUse{2};

/*! \brief Counts an import, for the owner of the memory, as long as it lives. */
class Use {
 public:
  explicit Use(Count count) : count_(std::move(count)) { count_->fetch_add(1); }
  ~Use() { count_->fetch_sub(1); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  Count count_;
};

template <typename T>
T TakeValue(const Exported& exported) {
  T value;
  if (exported.bytes.size() != sizeof(value)) {
    Fail(kind::kRuntime, "a handle of memory has ", exported.bytes.size(), " bytes, not ",
         sizeof(value));
  }
  memcpy(&value, exported.bytes.data(), sizeof(value));
  return value;
}
template <typename T>
std::string BytesOf(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

int OnlyFile(const Exported& exported) {
  if (exported.files.size() != 1) {
    Fail(kind::kRuntime, "memory came with ", exported.files.size(), " files, not one");
  }
  return exported.files[0].get();
}

/*! \brief An allocation of the driver's virtual memory, mapped at an address range of its own. */
class Mapped {
 public:
  /*! \brief Map the allocation and take ownership of it. It lives as long as it is mapped or
   *         exported. */
  Mapped(std::shared_ptr<Device> device, Allocation allocation, size_t bytes)
      : device_(std::move(device)), bytes_(bytes) {
    const Driver& driver = device_->driver();
    Access access;
    access.location.id = device_->ordinal();
    const char* what = "to map memory of a rank";
    try {
      driver.cuMemAddressReserve(what, &base_, bytes, 0, 0, 0);
      driver.cuMemMap(what, base_, bytes, 0, allocation, 0);
      mapped_ = true;
      driver.cuMemSetAccess(what, base_, bytes, &access, 1);
    } catch (const Error&) {
      driver.cuMemRelease.Try(allocation);
      Unmap();
      throw;
    }
    driver.cuMemRelease.Try(allocation);
  }
  ~Mapped() { Unmap(); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  Address base() const { return base_; }

 private:
  void Unmap() {
    Quietly(*device_, [&](const Driver& driver) {
      // Kernels that use it may still be running.
      if (mapped_) driver.cuStreamSynchronize.Try(nullptr);
      if (mapped_) driver.cuMemUnmap.Try(base_, bytes_);
      if (base_ != 0) driver.cuMemAddressFree.Try(base_, bytes_);
    });
  }

  std::shared_ptr<Device> device_;
  size_t bytes_;
  Address base_ = 0;
  bool mapped_ = false;
};

class OwnFiles final : public OwnMemory {
 public:
  OwnFiles(const std::shared_ptr<Device>& device, size_t bytes) {
    const Driver& driver = device->driver();
    if (!device->facts().files) {
      Fail(kind::kRuntime, device->name(),
           " cannot share virtual memory by file descriptors, says its driver");
    }
    AllocationProperties properties;
    properties.location.id = device->ordinal();
    constexpr int kMinimum = 0;
    size_t granularity = 0;
    driver.cuMemGetAllocationGranularity("the granularity of memory", &granularity, &properties,
                                         kMinimum);
    bytes_ = (bytes + granularity - 1) / granularity * granularity;
    Allocation allocation = 0;
    const std::string what = Text("to allocate ", bytes_, " bytes on ", device->name());
    driver.cuMemCreate(what.c_str(), &allocation, bytes_, &properties, 0);
    int file = -1;
    const Status status =
        driver.cuMemExportToShareableHandle.Try(&file, allocation, properties.handle_types, 0);
    if (status != kSuccess) {
      driver.cuMemRelease.Try(allocation);
      FailCall("cuMemExportToShareableHandle", what.c_str(), status);
    }
    file_ = File(file);
    fcntl(file_.get(), F_SETFD, FD_CLOEXEC);
    mapped_ = std::make_unique<Mapped>(device, allocation, bytes_);
    base_ = mapped_->base();
  }
  Exported Export() const final {
    Exported exported{BytesOf(bytes_), {}};
    exported.files.emplace_back(DuplicateFile(file_.get()));
    if (exported.files[0].get() < 0) {
      Fail(kind::kRuntime, "cannot duplicate the file of a rank's memory: ", strerror(errno),
           FilesHint(errno));
    }
    return exported;
  }

 private:
  File file_;
  std::unique_ptr<Mapped> mapped_;
};

class ImportedFiles final : public Memory {
 public:
  ImportedFiles(const std::shared_ptr<Device>& device, const Exported& exported, Count count)
      : use_(std::move(count)) {
    bytes_ = TakeValue<size_t>(exported);
    Allocation allocation = 0;
    // The driver expects the file descriptor's number in place of a pointer.
    void* file = reinterpret_cast<void*>(static_cast<intptr_t>(OnlyFile(exported)));
    constexpr int kPosixFile = 1;
    device->driver().cuMemImportFromShareableHandle("to import memory of a rank", &allocation, file,
                                                    kPosixFile);
    mapped_ = std::make_unique<Mapped>(device, allocation, bytes_);
    base_ = mapped_->base();
  }

 private:
  Use use_;
  std::unique_ptr<Mapped> mapped_;
};

class Plain final : public Memory {
 public:
  Plain(std::shared_ptr<Device> device, size_t bytes) : device_(std::move(device)) {
    bytes_ = bytes;
    const std::string what = Text("to allocate ", bytes, " bytes on ", device_->name());
    device_->driver().cuMemAlloc_v2(what.c_str(), &base_, bytes);
  }
  ~Plain() final {
    Quietly(*device_, [this](const Driver& driver) { driver.cuMemFree_v2.Try(base_); });
  }

 private:
  std::shared_ptr<Device> device_;
};

/*! \brief What other ranks need to import an allocation of the mode kLegacy. */
struct LegacyHandle {
  size_t bytes;
  int32_t pid;
  int32_t ordinal;  // in the exporting process
  Address base;
  IpcHandle handle;
};

class OwnLegacy final : public OwnMemory {
 public:
  OwnLegacy(const std::shared_ptr<Device>& device, size_t bytes, Count count)
      : device_(device),
        count_(std::move(count)),
        memory_(std::make_unique<Plain>(device, WholePages(bytes))) {
    base_ = memory_->base();
    bytes_ = memory_->bytes();
    handle_ = {bytes_, getpid(), device->ordinal(), base_, {}};
    device->driver().cuIpcGetMemHandle("to export memory of a rank", &handle_.handle, base_);
  }
  ~OwnLegacy() final {
    // Freeing memory that another process maps is undefined behaviour, so wait for the ranks that
    // map it. They shut down at the same time.
    const auto end = std::chrono::steady_clock::now() + kLastUse;
    while (!device_->in_forked_child() && count_->load() > 0 &&
           std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (count_->load() > 0) memory_.release();  // leaked until the process ends
  }
  Exported Export() const final { return {BytesOf(handle_), {}}; }

 private:
  std::shared_ptr<Device> device_;
  Count count_;
  std::unique_ptr<Plain> memory_;
  LegacyHandle handle_;
};

class ImportedLegacy final : public Memory {
 public:
  ImportedLegacy(const std::shared_ptr<Device>& device, const Exported& exported, Count count)
      : use_(std::move(count)), device_(device) {
    const auto theirs = TakeValue<LegacyHandle>(exported);
    bytes_ = theirs.bytes;
    if (theirs.pid == getpid()) {  // the driver does not open a handle in the exporting process
      if (theirs.ordinal != device->ordinal()) device->ReachPeer(*Device::Open(theirs.ordinal));
      base_ = theirs.base;
      return;
    }
    constexpr unsigned kReachPeers = 1;
    device->driver().cuIpcOpenMemHandle_v2("to import memory of a rank", &base_, theirs.handle,
                                           kReachPeers);
    opened_ = true;
  }
  ~ImportedLegacy() final {
    if (!opened_) return;
    Quietly(*device_, [this](const Driver& driver) { driver.cuIpcCloseMemHandle.Try(base_); });
  }

 private:
  Use use_;
  std::shared_ptr<Device> device_;
  bool opened_ = false;
};

/*! \brief A shared memory file, mapped and pinned. */
class HostFile {
 public:
  HostFile(const std::shared_ptr<Device>& device, int file)
      : bytes_(FileBytes(file)), data_(MapFile(file, bytes_)) {
    try {
      pinned_ = Pinned::Register(device, data_, bytes_);
      base_ = Pinned::On(*device, data_);
    } catch (const Error&) {
      pinned_.reset();
      munmap(data_, bytes_);
      throw;
    }
  }
  ~HostFile() {
    pinned_.reset();
    munmap(data_, bytes_);
  }
  HostFile(const HostFile&) = delete;
  HostFile& operator=(const HostFile&) = delete;

  Address base() const { return base_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  void* data_;
  std::shared_ptr<Pinned> pinned_;
  Address base_ = 0;
};

class OwnHost final : public OwnMemory {
 public:
  OwnHost(const std::shared_ptr<Device>& device, size_t bytes)
      : file_(MakeMemoryFile("tvm_ipc region", WholePages(bytes))), mapped_(device, file_.get()) {
    base_ = mapped_.base();
    bytes_ = mapped_.bytes();
  }
  Exported Export() const final {
    Exported exported;
    exported.files.emplace_back(DuplicateFile(file_.get()));
    if (exported.files[0].get() < 0) {
      Fail(kind::kRuntime, "cannot duplicate the file of a rank's memory: ", strerror(errno),
           FilesHint(errno));
    }
    return exported;
  }

 private:
  File file_;
  HostFile mapped_;
};

class ImportedHost final : public Memory {
 public:
  ImportedHost(const std::shared_ptr<Device>& device, const Exported& exported, Count count)
      : use_(std::move(count)), mapped_(device, OnlyFile(exported)) {
    base_ = mapped_.base();
    bytes_ = mapped_.bytes();
  }

 private:
  Use use_;
  HostFile mapped_;
};

}  // namespace

const char* NameOf(SharingMode mode) {
  switch (mode) {
    case SharingMode::kFiles:
      return "vmm";
    case SharingMode::kLegacy:
      return "legacy";
    case SharingMode::kHost:
      return "host";
    case SharingMode::kNone:
      break;
  }
  return "none";
}

std::shared_ptr<Memory> AllocatePlain(const std::shared_ptr<Device>& device, size_t bytes) {
  const Here here(*device);
  return std::make_shared<Plain>(device, bytes);
}

std::shared_ptr<OwnMemory> Allocate(SharingMode mode, const std::shared_ptr<Device>& device,
                                    size_t bytes, Count mapped) {
  const Here here(*device);
  if (mode == SharingMode::kFiles) return std::make_shared<OwnFiles>(device, bytes);
  if (mode == SharingMode::kLegacy)
    return std::make_shared<OwnLegacy>(device, bytes, std::move(mapped));
  return std::make_shared<OwnHost>(device, bytes);
}

std::shared_ptr<Memory> Import(SharingMode mode, const std::shared_ptr<Device>& device,
                               Exported exported, Count mapped) {
  const Here here(*device);
  if (mode == SharingMode::kFiles) {
    return std::make_shared<ImportedFiles>(device, exported, std::move(mapped));
  }
  if (mode == SharingMode::kLegacy) {
    return std::make_shared<ImportedLegacy>(device, exported, std::move(mapped));
  }
  return std::make_shared<ImportedHost>(device, exported, std::move(mapped));
}

}  // namespace tvm_ipc::cuda
