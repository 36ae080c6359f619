/* SPDX-License-Identifier: Apache-2.0 */
/*! \file worker_socket_to_session_server.cc */
#include "core/worker_socket_to_session_server.h"

#include <poll.h>

#include <cerrno>

#include "core/atfork_descriptors.h"

namespace tvm_ipc {

Connection::Connection(File socket) : socket_(socket.Give()), born_(Generation()) {
  KeepFromChildren(socket_);
}

Connection::~Connection() { CloseKept(socket_); }

bool Connection::in_forked_child() const { return born_ != Generation(); }

bool Connection::Send(FrameType type, const std::string& payload, const std::vector<int>& files) {
  if (in_forked_child()) {  // another thread of the parent may have held the mutex
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

int Connection::Duplicate() const { return DuplicateFile(socket_); }

}  // namespace tvm_ipc
