/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file node_link.h
 * \brief The connection between a node's hub and the controller's: messages in both directions, and
 *        whether the other end lives.
 *
 * Who is at the other end was proven before: the socket is all that is given. It belongs to the
 * hub's thread, which never waits in it. Large messages go in pieces, so that short ones that are
 * urgent can overtake them; all others arrive in the order in which they were sent.
 */
#ifndef TVM_IPC_CORE_NODE_LINK_H_
#define TVM_IPC_CORE_NODE_LINK_H_

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <deque>
#include <string>
#include <vector>

#include "core/file.h"
#include "core/frame.h"
#include "core/node_message.h"

namespace tvm_ipc {

/*! \brief The most bytes of a frame's payload between nodes. */
constexpr size_t kPieceBytes = 32 << 10;
/*! \brief With so many bytes on their way a link is full: who fills it has to wait. */
constexpr size_t kFullBytes = 4 << 20;

struct LinkTimes {
  /*! \brief After so long without a word a beat is sent. */
  std::chrono::milliseconds beat{1000};
  /*! \brief So long without a word, or without taking one, the other end is lost. */
  std::chrono::milliseconds silence{10000};
};

class NodeLink {
 public:
  /*!
   * \param late Whether the other end may begin to speak as late as it will: its silence counts
   * from its first word on.
   */
  NodeLink(File socket, const LinkTimes& times, bool late = false);
  ~NodeLink();
  NodeLink(const NodeLink&) = delete;
  NodeLink& operator=(const NodeLink&) = delete;

  int socket() const { return socket_; }
  /*! \brief Send after all that was sent so. */
  void Send(const NodeMessage& message);
  /*! \brief Send a short message before all that has not begun to go. */
  void SendFirst(const NodeMessage& message);
  bool full() const { return queued_ > kFullBytes; }

  void Watch(std::vector<pollfd>* polled) const;
  /*! \brief Read what has come. */
  void Hear();
  /*! \brief The next message; those that came before the link broke are still given. */
  bool Next(NodeMessage* message);
  /*!
   * \brief Send what the socket takes, and a beat if it is time; see whether the other end lives.
   * \return How many milliseconds this can be left alone.
   */
  int Tick();
  /*! \brief Why no more will come; empty while the link is whole. */
  const std::string& broken() const { return broken_; }
  /*! \brief Believe nothing more of what came; always false. */
  bool GiveUp(const std::string& why);

 private:
  using Clock = std::chrono::steady_clock;

  /*!
   * \brief While this program did not run, as where a virtual machine or a container stood still,
   * it heard nobody: that is no silence of the other end's.
   */
  void LeaveOutStandstill();
  void Queue(std::deque<std::string>* queue, FrameType type, const char* bytes, size_t count);
  void Flush();
  void Break(const std::string& why);

  const int socket_;
  const LinkTimes times_;
  FrameReader reader_;
  /*! \brief The pieces of a message that is not whole. */
  std::string begun_;
  std::deque<std::string> urgent_;
  std::deque<std::string> ordered_;
  /*! \brief The frame on its way, and how much of it has gone. */
  std::string current_;
  size_t gone_ = 0;
  size_t queued_ = 0;
  /*! \brief When something came; when something was said; since when what waits does not move. */
  Clock::time_point heard_, said_, moved_;
  /*! \brief Whether the other end's silence counts. */
  bool begun_to_speak_;
  /*! \brief When this was to be looked at again. */
  Clock::time_point due_;
  std::string broken_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_NODE_LINK_H_
