/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_control_messages_and_heartbeats.h
 * \brief The connection between a node's session server and the controller's: messages in both
 *        directions, and heartbeats.
 *
 * The other end was authenticated before. Only the session server's thread uses a link, and never
 * blocks in it. Large messages are sent in pieces, so that short urgent ones can overtake them. All
 * others arrive in the order in which they were sent.
 */
#ifndef TVM_IPC_CORE_INTERNODE_CONTROL_MESSAGES_AND_HEARTBEATS_H_
#define TVM_IPC_CORE_INTERNODE_CONTROL_MESSAGES_AND_HEARTBEATS_H_

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <deque>
#include <string>
#include <vector>

#include "core/file_descriptor_and_memory_file.h"
#include "core/frame.h"
#include "core/session_server_node_message.h"

namespace tvm_ipc {

/*! \brief The most bytes of a frame's payload between nodes. */
constexpr size_t kPieceBytes = 32 << 10;
/*! \brief With this many queued bytes a link is full, and its users have to wait. */
constexpr size_t kFullBytes = 4 << 20;

struct LinkTimes {
  /*! \brief After this time without a message a heartbeat is sent. */
  std::chrono::milliseconds beat{1000};
  /*! \brief After this time without receiving or accepting a message the other end is lost. */
  std::chrono::milliseconds silence{10000};
};

class NodeLink {
 public:
  /*!
   * \param late Whether the other end may send its first message at any time, and may be stopped by
   *        its user (Ctrl-Z). Over TCP its silence does not count then: this end sends heartbeats,
   *        and the kernel ends the connection if the other machine acknowledges nothing for the
   *        time of `silence`. Over other sockets silence counts from its first message on.
   */
  NodeLink(File socket, const LinkTimes& times, bool late = false);
  ~NodeLink();
  NodeLink(const NodeLink&) = delete;
  NodeLink& operator=(const NodeLink&) = delete;

  int socket() const { return socket_; }
  /*! \brief Queue a message after all earlier ones. */
  void Send(const NodeMessage& message);
  /*! \brief Send a short message before everything that has not been started. */
  void SendFirst(const NodeMessage& message);
  bool full() const { return queued_ > kFullBytes; }

  void Watch(std::vector<pollfd>* polled) const;
  /*! \brief Read the available bytes. */
  void Receive();
  /*! \brief Get the next message, also after the link broke, if it arrived before. */
  bool Next(NodeMessage* message);
  /*!
   * \brief Send what the socket takes, and a heartbeat if one is due; check for silence.
   * \return In how many milliseconds to call this again.
   */
  int Tick();
  /*! \brief Why the link is broken; empty while it is not. */
  const std::string& broken() const { return broken_; }
  /*! \brief Break the link and discard received messages; always return false. */
  bool GiveUp(const std::string& why);

 private:
  using Clock = std::chrono::steady_clock;

  /*!
   * \brief Exclude time in which this program did not run, for example in a paused virtual machine:
   *        that is no silence of the other end.
   */
  void ExcludeStandstill();
  void Queue(std::deque<std::string>* queue, FrameType type, const char* bytes, size_t count);
  void Flush();
  void Break(const std::string& why);

  const int socket_;
  const LinkTimes times_;
  FrameReader reader_;
  /*! \brief The pieces so far of an incomplete message. */
  std::string partial_;
  std::deque<std::string> urgent_;
  std::deque<std::string> ordered_;
  /*! \brief The frame that is being sent, and how many of its bytes have been. */
  std::string current_;
  size_t current_sent_ = 0;
  size_t queued_ = 0;
  /*! \brief The times of the last received bytes, sent bytes, and progress of the queue. */
  Clock::time_point received_at_, sent_at_, progress_at_;
  /*! \brief Whether the other end's silence counts. */
  bool silence_counts_;
  /*! \brief Whether it never does, because the kernel detects the loss of the other machine. */
  bool watched_by_kernel_ = false;
  /*! \brief The time when `Tick` is due. */
  Clock::time_point due_;
  std::string broken_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_INTERNODE_CONTROL_MESSAGES_AND_HEARTBEATS_H_
