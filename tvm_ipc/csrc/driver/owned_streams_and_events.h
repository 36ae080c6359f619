/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file owned_streams_and_events.h
 * \brief Streams and events that this library owns.
 */
#ifndef TVM_IPC_DRIVER_OWNED_STREAMS_AND_EVENTS_H_
#define TVM_IPC_DRIVER_OWNED_STREAMS_AND_EVENTS_H_

#include <cstddef>
#include <memory>

#include "driver/device_properties_and_context.h"

namespace tvm_ipc::cuda {

/*! \brief A non-blocking stream, which does not wait for the program's default stream. Its
 *         destructor waits for everything on it. */
class OwnStream {
 public:
  explicit OwnStream(std::shared_ptr<Device> device);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  Stream get() const { return stream_; }
  void Wait() const;
  void Zero(Address address, size_t bytes) const;
  /*! \brief Copy between host and device, or within either, and wait for the copy. */
  void Copy(Address target, Address source, size_t bytes) const;

 private:
  std::shared_ptr<Device> device_;
  Stream stream_ = nullptr;
};

/*! \brief An event on a stream, for which other streams wait. The device's context must be current
 *         on the calling thread. */
class OwnEvent {
 public:
  explicit OwnEvent(std::shared_ptr<Device> device);
  ~OwnEvent();
  OwnEvent(const OwnEvent&) = delete;
  OwnEvent& operator=(const OwnEvent&) = delete;

  void Record(Stream stream) const;
  /*! \brief Record the event without throwing; return the status. */
  Status TryRecord(Stream stream) const;
  /*! \brief Make later work on the stream wait for the event. */
  void Await(Stream stream) const;
  /*! \brief Block the calling thread until the event has completed. */
  Status TryWait() const;
  /*! \brief Return whether the event has not completed yet and the device has no error. */
  bool pending() const;

 private:
  std::shared_ptr<Device> device_;
  Event event_ = nullptr;
};

/*! \brief Return the stream on which the calling thread's programs run. */
Stream ProgramStream(const Device& device);
/*!
 * \brief Return whether a stream is one of CUDA's default streams, which live as long as the
 *        process. Only these may be used later: programs may destroy their streams at any time, and
 *        CUDA crashes if a destroyed stream is used.
 */
bool IsDefaultStream(Stream stream);
/*! \brief Return whether a CUDA graph is being captured from the stream. */
bool IsCapturing(const Device& device, Stream stream);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_DRIVER_OWNED_STREAMS_AND_EVENTS_H_
