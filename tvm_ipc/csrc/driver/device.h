/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file device.h
 * \brief The devices that NVIDIA's driver sees: facts, and contexts.
 */
#ifndef TVM_IPC_DRIVER_DEVICE_H_
#define TVM_IPC_DRIVER_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "driver/driver.h"

namespace tvm_ipc::cuda {

/*! \brief What DLPack calls these devices: kDLCUDA. */
constexpr int32_t kDeviceType = 2;

/*! \brief What a device is. To ask makes no context. */
struct DeviceFacts {
  int ordinal = 0;
  std::string name;
  /*! \brief As nvidia-smi has it. The parts of a device that is divided (MIG) have their own. */
  std::string uuid;
  /*! \brief "0000:17:00.0". */
  std::string pci;
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
  size_t memory = 0;
  /*! \brief Whether memory can be shared with other processes by file descriptors. */
  bool files = false;

  /*! \brief As 90 for 9.0. */
  int capability() const { return 10 * major + minor; }
};

/*! \brief Facts of a device; an error if there is none with the number. */
DeviceFacts FactsOf(int ordinal);

/*! \brief How two devices reach each other. */
enum class LinkKind { kNone, kSame, kPcie, kNvlink };
/*! \brief "nvlink" and the like; "" where they do not. */
const char* NameOf(LinkKind link);
LinkKind LinkBetween(int ordinal, int other);

/*! \brief A device that this process uses: its primary context, which TVM uses too. */
class Device {
 public:
  /*! \brief Use a device, together with all others of this process that do. */
  static std::shared_ptr<Device> Open(int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const DeviceFacts& facts() const { return facts_; }
  int ordinal() const { return facts_.ordinal; }
  /*! \brief "cuda:1 (NVIDIA H200)". */
  std::string name() const;
  const Driver& driver() const { return driver_; }
  Context context() const { return context_; }
  /*! \brief Of its memory, now. */
  size_t FreeMemory() const;
  /*! \brief Kernels on this device may use memory of another one of this process. */
  void ReachPeer(const Device& other) const;
  /*! \brief Whether this is the copy in a process that was forked off: it must not be touched. */
  bool forked() const;

 private:
  explicit Device(int ordinal);

  const Driver& driver_;
  DeviceFacts facts_;
  Context context_ = nullptr;
  uint32_t generation_;
};

/*! \brief While it lives, the device's context is the calling thread's. */
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

/*! \brief Calls the driver where a destructor must not throw, with the device's context. */
template <typename Calls>
void Quietly(const Device& device, const Calls& calls) {
  if (device.forked()) return;
  Context context = nullptr;
  if (device.driver().cuCtxPushCurrent_v2.Try(device.context()) != kSuccess) return;
  calls(device.driver());
  device.driver().cuCtxPopCurrent_v2.Try(&context);
}

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_DRIVER_DEVICE_H_
