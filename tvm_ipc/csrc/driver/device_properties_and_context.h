/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file device_properties_and_context.h
 * \brief The devices that NVIDIA's driver reports: their properties and contexts.
 */
#ifndef TVM_IPC_DRIVER_DEVICE_PROPERTIES_AND_CONTEXT_H_
#define TVM_IPC_DRIVER_DEVICE_PROPERTIES_AND_CONTEXT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "driver/cuda_driver_api.h"

namespace tvm_ipc::cuda {

/*! \brief The DLPack device type, kDLCUDA. */
constexpr int32_t kDeviceType = 2;

/*! \brief The properties of a device. Querying them creates no context. */
struct DeviceFacts {
  int ordinal = 0;
  std::string name;
  /*! \brief The UUID as nvidia-smi prints it. Each MIG instance of a device has its own. */
  std::string uuid;
  /*! \brief The PCI address, such as "0000:17:00.0". */
  std::string pci;
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
  size_t memory = 0;
  /*! \brief Whether memory can be shared with other processes by file descriptors. */
  bool files = false;

  /*! \brief Return the compute capability: 90 for 9.0. */
  int capability() const { return 10 * major + minor; }
};

/*! \brief Return the properties of a device. Throw if there is none with the number. */
DeviceFacts FactsOf(int ordinal);

/*! \brief The link between two devices. */
enum class LinkKind { kNone, kSame, kPcie, kNvlink };
/*! \brief Return the name of a link, such as "nvlink"; "" for kNone. */
const char* NameOf(LinkKind link);
LinkKind LinkBetween(int ordinal, int other);

/*! \brief A device that this process uses, with its primary context, which TVM also uses. */
class Device {
 public:
  /*! \brief Return a device, which all users in this process share. */
  static std::shared_ptr<Device> Open(int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const DeviceFacts& facts() const { return facts_; }
  int ordinal() const { return facts_.ordinal; }
  /*! \brief Return the name of the device, such as "cuda:1 (NVIDIA H200)". */
  std::string name() const;
  const Driver& driver() const { return driver_; }
  Context context() const { return context_; }
  /*! \brief Return the number of bytes of device memory that are currently free. */
  size_t FreeMemory() const;
  /*! \brief Enable kernels on this device to access memory of another device of this process. */
  void ReachPeer(const Device& other) const;
  /*! \brief Return whether this is a copy in a forked child process, which must not use it. */
  bool in_forked_child() const;

 private:
  explicit Device(int ordinal);

  const Driver& driver_;
  DeviceFacts facts_;
  Context context_ = nullptr;
  uint32_t generation_;
};

/*! \brief A scope in which the device's context is current on the calling thread. */
class Here {
 public:
  explicit Here(const Device& device) : device_(device) {
    Context current = nullptr;
    device.driver().cuCtxGetCurrent.Try(&current);
    if (current == device.context()) return;
    device.driver().cuCtxPushCurrent_v2("to use a device", device.context());
    pushed_ = true;
  }
  ~Here() {
    Context context = nullptr;
    if (pushed_) device_.driver().cuCtxPopCurrent_v2.Try(&context);
  }
  Here(const Here&) = delete;
  Here& operator=(const Here&) = delete;

 private:
  const Device& device_;
  bool pushed_ = false;
};

/*! \brief Call the driver with the device's context, from a destructor, which must not throw. */
template <typename Calls>
void Quietly(const Device& device, const Calls& calls) {
  if (device.in_forked_child()) return;
  Context context = nullptr;
  if (device.driver().cuCtxPushCurrent_v2.Try(device.context()) != kSuccess) return;
  calls(device.driver());
  device.driver().cuCtxPopCurrent_v2.Try(&context);
}

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_DRIVER_DEVICE_PROPERTIES_AND_CONTEXT_H_
