/* SPDX-License-Identifier: Apache-2.0 */
/*! \file device_properties_and_context.cc */
#include "driver/device_properties_and_context.h"

#include <cstdio>
#include <map>
#include <mutex>

#include "core/atfork_descriptors.h"
#include "core/error.h"

namespace tvm_ipc::cuda {

namespace {

int Handle(const Driver& driver, int ordinal) {
  if (ordinal < 0 || ordinal >= driver.num_devices()) {
    Fail(kind::kValue, "there is no device cuda:", ordinal, " among the ", driver.num_devices(),
         " that NVIDIA's driver shows to this process; device_ids are numbers from 0 on");
  }
  int handle = 0;
  driver.cuDeviceGet("to find a device", &handle, ordinal);
  return handle;
}

/*! \brief Return an attribute, or 0 if the driver does not know it. */
int Ask(const Driver& driver, Attribute attribute, int handle) {
  int value = 0;
  return driver.cuDeviceGetAttribute.Try(&value, attribute, handle) == kSuccess ? value : 0;
}

std::string Expose(const Uuid& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    char digits[4];
    snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += digits;
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
}

}  // namespace

DeviceFacts FactsOf(int ordinal) {
  const Driver& driver = TheDriver();
  const int handle = Handle(driver, ordinal);
  auto ask = [&](Attribute attribute) { return Ask(driver, attribute, handle); };
  DeviceFacts facts;
  facts.ordinal = ordinal;
  char name[256] = "";
  driver.cuDeviceGetName("the name of a device", name, sizeof(name), handle);
  facts.name = name;
  Uuid uuid{};
  driver.cuDeviceGetUuid_v2("the identity of a device", &uuid, handle);
  facts.uuid = Expose(uuid);
  char pci[32];
  snprintf(pci, sizeof(pci), "%04x:%02x:%02x.0", ask(kPciDomain), ask(kPciBus), ask(kPciDevice));
  facts.pci = pci;
  facts.major = ask(kCapabilityMajor);
  facts.minor = ask(kCapabilityMinor);
  facts.multiprocessors = ask(kMultiprocessors);
  driver.cuDeviceTotalMem_v2("the memory of a device", &facts.memory, handle);
  facts.files = ask(kVirtualMemory) != 0 && ask(kPosixFiles) != 0;
  return facts;
}

const char* NameOf(LinkKind link) {
  switch (link) {
    case LinkKind::kNone:
      break;
    case LinkKind::kSame:
      return "same device";
    case LinkKind::kPcie:
      return "pcie";
    case LinkKind::kNvlink:
      return "nvlink";
  }
  return "";
}

LinkKind LinkBetween(int ordinal, int other) {
  if (ordinal == other) return LinkKind::kSame;
  const Driver& driver = TheDriver();
  const int from = Handle(driver, ordinal);
  const int to = Handle(driver, other);
  int reaches = 0;
  if (driver.cuDeviceCanAccessPeer.Try(&reaches, from, to) != kSuccess || reaches == 0) {
    return LinkKind::kNone;
  }
  int atomics = 0;
  const Status status = driver.cuDeviceGetP2PAttribute.Try(&atomics, kPeerAtomics, from, to);
  return status == kSuccess && atomics != 0 ? LinkKind::kNvlink : LinkKind::kPcie;
}

std::shared_ptr<Device> Device::Open(int ordinal) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<Device>> open;
  std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<Device>& known = open[ordinal];
  std::shared_ptr<Device> device = known.lock();
  if (device == nullptr) {
    device.reset(new Device(ordinal));
    known = device;
  }
  return device;
}

Device::Device(int ordinal)
    : driver_(TheDriver()), facts_(FactsOf(ordinal)), generation_(Generation()) {
  driver_.cuDevicePrimaryCtxRetain(Text("to start ", name()).c_str(), &context_,
                                   Handle(driver_, ordinal));
}

Device::~Device() {
  // The driver may already have shut down, at the end of the process.
  if (!in_forked_child()) driver_.cuDevicePrimaryCtxRelease_v2.Try(facts_.ordinal);
}

std::string Device::name() const { return Text("cuda:", facts_.ordinal, " (", facts_.name, ")"); }

size_t Device::FreeMemory() const {
  const Here here(*this);
  size_t free = 0;
  size_t total = 0;
  driver_.cuMemGetInfo_v2("the free memory of a device", &free, &total);
  return free;
}

void Device::ReachPeer(const Device& other) const {
  if (other.ordinal() == ordinal()) return;
  const Here here(*this);
  const Status status = driver_.cuCtxEnablePeerAccess.Try(other.context(), 0);
  if (status == kSuccess || status == kPeerAccessAlreadyEnabled) return;
  FailCall("cuCtxEnablePeerAccess", Text(name(), " cannot reach ", other.name()).c_str(), status);
}

bool Device::in_forked_child() const { return generation_ != Generation(); }

}  // namespace tvm_ipc::cuda
