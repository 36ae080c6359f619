/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file worker_socket_to_session_server.h
 * \brief A worker's connection to the session server.
 */
#ifndef TVM_IPC_CORE_WORKER_SOCKET_TO_SESSION_SERVER_H_
#define TVM_IPC_CORE_WORKER_SOCKET_TO_SESSION_SERVER_H_

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/frame.h"

namespace tvm_ipc {

/*! \brief The connection of a worker. Any thread may send; the copy in a forked process sends
 * nothing. */
class Connection {
 public:
  explicit Connection(File socket);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  /*! \brief Return whether this is a copy in a process that the worker has forked. */
  bool in_forked_child() const;
  /*! \brief Send a frame; return false, with errno, if the server is gone. */
  bool Send(FrameType type, const std::string& payload, const std::vector<int>& files = {});
  /*! \brief Get the server's next frame, if one arrives until `end`. One thread at a time. */
  bool Receive(Frame* frame, std::chrono::steady_clock::time_point end);
  /*! \brief Return whether the server has closed the connection. */
  bool ended() const { return ended_; }
  /*! \brief Return the mutex that the receiving thread holds. */
  std::mutex& receive_mutex() { return receive_mutex_; }
  /*! \brief Duplicate the descriptor; return -1, with errno, if there is none left. */
  int Duplicate() const;

 private:
  const int socket_;
  const uint32_t born_;
  std::mutex send_mutex_;
  std::mutex receive_mutex_;
  FrameReader reader_;
  bool ended_ = false;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_WORKER_SOCKET_TO_SESSION_SERVER_H_
