/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file connection.h
 * \brief A worker's connection to the hub.
 */
#ifndef TVM_IPC_CORE_CONNECTION_H_
#define TVM_IPC_CORE_CONNECTION_H_

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/frame.h"

namespace tvm_ipc {

/*! \brief Any thread of the worker may send; its copy in a forked process sends nothing. */
class Connection {
 public:
  explicit Connection(File socket);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  /*! \brief Whether this is a copy in a process that was forked off the worker's. */
  bool forked() const;
  /*! \brief Send a frame; false, with errno, if the hub is gone. */
  bool Send(FrameType type, const std::string& payload, const std::vector<int>& files = {});
  /*! \brief The next frame of the hub, if one comes until then. For one thread at a time. */
  bool Receive(Frame* frame, std::chrono::steady_clock::time_point end);
  /*! \brief Whether no more will come. */
  bool ended() const { return ended_; }
  /*! \brief Held by the thread that receives. */
  std::mutex& receive_mutex() { return receive_mutex_; }
  /*! \brief Another descriptor of it; -1, with errno, if there is none left. */
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
#endif  // TVM_IPC_CORE_CONNECTION_H_
