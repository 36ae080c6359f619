/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file stream.h
 * \brief Streams and events of a device that are ours.
 */
#ifndef TVM_IPC_DRIVER_STREAM_H_
#define TVM_IPC_DRIVER_STREAM_H_

#include <cstddef>
#include <memory>

#include "driver/device.h"

namespace tvm_ipc::cuda {

/*! \brief A stream for what must not wait for the program's; what is on it is waited for. */
class OwnStream {
 public:
  explicit OwnStream(std::shared_ptr<Device> device);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  Stream get() const { return stream_; }
  void Wait() const;
  void Zero(Address address, size_t bytes) const;
  /*! \brief Between host and device, or within either. */
  void Copy(Address target, Address source, size_t bytes) const;

 private:
  std::shared_ptr<Device> device_;
  Stream stream_ = nullptr;
};

/*! \brief A mark on a stream, for which others wait. The calling thread has the device's context.
 */
class OwnEvent {
 public:
  explicit OwnEvent(std::shared_ptr<Device> device);
  ~OwnEvent();
  OwnEvent(const OwnEvent&) = delete;
  OwnEvent& operator=(const OwnEvent&) = delete;

  void Record(Stream stream) const;
  /*! \brief What the stream gets from now on waits for it. */
  void Await(Stream stream) const;
  /*! \brief Whether the device has not come to it, and is sound. */
  bool pending() const;

 private:
  std::shared_ptr<Device> device_;
  Event event_ = nullptr;
};

/*! \brief The stream on which the calling thread's programs run. */
Stream ProgramStream(const Device& device);
/*! \brief Whether a CUDA graph is being captured from the stream. */
bool IsCapturing(const Device& device, Stream stream);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_DRIVER_STREAM_H_
