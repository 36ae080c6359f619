/* SPDX-License-Identifier: Apache-2.0 */
/*! \file connection.cc */
#include "core/connection.h"

#include <fcntl.h>
#include <poll.h>

#include <cerrno>

#include "core/forked.h"

namespace tvm_ipc {

Connection::Connection(File socket) : socket_(socket.Give()), born_(Generation()) {
  KeepFromChildren(socket_);
}

Connection::~Connection() { CloseKept(socket_); }

bool Connection::forked() const { return born_ != Generation(); }

bool Connection::Send(FrameType type, const std::string& payload, const std::vector<int>& files) {
  if (forked()) {  // another thread of the parent may have held the mutex
    errno = ENOTCONN;
    return false;
  }
  std::lock_guard<std::mutex> lock(send_mutex_);
  return SendFrame(socket_, type, payload, files);
}

bool Connection::Receive(Frame* frame, std::chrono::steady_clock::time_point end) {
  while (!reader_.Next(frame)) {
    const auto left = end - std::chrono::steady_clock::now();
    if (ended_ || left.count() <= 0) return false;
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    pollfd polled{socket_, POLLIN, 0};
    if (poll(&polled, 1, static_cast<int>(wait)) > 0) ended_ = !reader_.Read(socket_);
  }
  return true;
}

int Connection::Duplicate() const { return fcntl(socket_, F_DUPFD_CLOEXEC, 0); }

}  // namespace tvm_ipc
