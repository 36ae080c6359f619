/* SPDX-License-Identifier: Apache-2.0 */
/*! \file host_registration.cc */
#include "cuda/host_registration.h"

#include <map>
#include <mutex>

namespace tvm_ipc::cuda {

namespace {

/*! \brief The memory pinned in this process, by its address. */
struct AllPinned {
  std::mutex mutex;
  std::map<void*, std::weak_ptr<Pinned>> at;

  static AllPinned& Get() {
    static auto* all = new AllPinned();  // never destroyed: threads may outlive the program
    return *all;
  }
};

}  // namespace

std::shared_ptr<Pinned> Pinned::Register(const std::shared_ptr<Device>& device, void* data,
                                         size_t bytes) {
  AllPinned& all = AllPinned::Get();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::weak_ptr<Pinned>& known = all.at[data];
  std::shared_ptr<Pinned> pinned = known.lock();
  if (pinned == nullptr) {
    const Here here(*device);
    const Driver& driver = device->driver();
    Status status = driver.cuMemHostRegister_v2.Try(data, bytes, kPortableMapped);
    if (status == kHostMemoryAlreadyRegistered) {
      // An earlier mapping at this address could not be unregistered, or is about to be.
      driver.cuMemHostUnregister.Try(data);
      status = driver.cuMemHostRegister_v2.Try(data, bytes, kPortableMapped);
    }
    if (status != kSuccess) {
      FailCall("cuMemHostRegister", "to pin memory of the host for devices", status);
    }
    pinned.reset(new Pinned(device, data));
    known = pinned;
  }
  return pinned;
}

Pinned::~Pinned() {
  AllPinned& all = AllPinned::Get();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto known = all.at.find(data_);
  if (known != all.at.end() && !known->second.expired()) return;  // registered again meanwhile
  Quietly(*device_, [this](const Driver& driver) { driver.cuMemHostUnregister.Try(data_); });
  if (known != all.at.end()) all.at.erase(known);
}

Address Pinned::On(const Device& device, void* data) {
  const Here here(device);
  Address address = 0;
  device.driver().cuMemHostGetDevicePointer_v2("where a device sees pinned memory", &address, data,
                                               0);
  return address;
}

}  // namespace tvm_ipc::cuda
