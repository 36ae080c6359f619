/* SPDX-License-Identifier: Apache-2.0 */
/*! \file owned_streams_and_events.cc */
#include "driver/owned_streams_and_events.h"

#include <cstdint>
#include <utility>

#include "core/current_stream_hooks.h"

namespace tvm_ipc::cuda {

OwnStream::OwnStream(std::shared_ptr<Device> device) : device_(std::move(device)) {
  const Here here(*device_);
  device_->driver().cuStreamCreate("to make a stream", &stream_, kNonBlocking);
}

OwnStream::~OwnStream() {
  Quietly(*device_, [this](const Driver& driver) {
    driver.cuStreamSynchronize.Try(stream_);
    driver.cuStreamDestroy_v2.Try(stream_);
  });
}

void OwnStream::Wait() const {
  const Here here(*device_);
  device_->driver().cuStreamSynchronize("what was started on a device", stream_);
}

void OwnStream::Zero(Address address, size_t bytes) const {
  const Here here(*device_);
  device_->driver().cuMemsetD8Async("to clear memory", address, 0, bytes, stream_);
  Wait();
}

void OwnStream::Copy(Address target, Address source, size_t bytes) const {
  const Here here(*device_);
  device_->driver().cuMemcpyAsync("to copy memory", target, source, bytes, stream_);
  Wait();
}

OwnEvent::OwnEvent(std::shared_ptr<Device> device) : device_(std::move(device)) {
  device_->driver().cuEventCreate("to make an event", &event_, kWithoutTiming);
}

OwnEvent::~OwnEvent() {
  Quietly(*device_, [this](const Driver& driver) { driver.cuEventDestroy_v2.Try(event_); });
}

void OwnEvent::Record(Stream stream) const {
  device_->driver().cuEventRecord("to record an event", event_, stream);
}

Status OwnEvent::TryRecord(Stream stream) const {
  return device_->driver().cuEventRecord.Try(event_, stream);
}

Status OwnEvent::TryWait() const { return device_->driver().cuEventSynchronize.Try(event_); }

void OwnEvent::Await(Stream stream) const {
  device_->driver().cuStreamWaitEvent("to wait for an event", stream, event_, 0);
}

bool OwnEvent::pending() const {
  // Another thread may be capturing a graph. Relaxed mode keeps the query from invalidating it.
  const Driver& driver = device_->driver();
  int mode = kRelaxedCapture;
  driver.cuThreadExchangeStreamCaptureMode.Try(&mode);
  const Status status = driver.cuEventQuery.Try(event_);
  driver.cuThreadExchangeStreamCaptureMode.Try(&mode);
  return status == kNotReady;
}

Stream ProgramStream(const Device& device) {
  return static_cast<Stream>(ProgramStreams().current(kDeviceType, device.ordinal()));
}

bool IsDefaultStream(Stream stream) {
  constexpr uintptr_t kLastOfDefaults = 2;  // null, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD
  return reinterpret_cast<uintptr_t>(stream) <= kLastOfDefaults;
}

bool IsCapturing(const Device& device, Stream stream) {
  int status = kNotCapturing;
  return device.driver().cuStreamIsCapturing.Try(stream, &status) == kSuccess &&
         status != kNotCapturing;
}

}  // namespace tvm_ipc::cuda
