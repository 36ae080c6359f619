/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file client.h
 * \brief What speaks to a hub without being a rank: strangers, impostors, and workers by hand.
 */
#ifndef TVM_IPC_TESTS_CLIENT_H_
#define TVM_IPC_TESTS_CLIENT_H_

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "backends.h"
#include "core/frame.h"
#include "core/session_server.h"
#include "core/worker_handshake.h"
#include "expect.h"

namespace tvm_ipc {

inline SessionServerOptions Options(int num_ranks, double timeout_seconds = 60) {
  SessionServerOptions options;
  options.backend = &FindBackend("shm");
  options.num_ranks = num_ranks;
  options.timeout_seconds = timeout_seconds;
  options.arena_bytes = 4 << 20;
  return options;
}

/*! \brief Connects, while the hub lets anybody, and says nothing. */
class Caller {
 public:
  explicit Caller(const Invitation& invitation) {
    socket_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path + 1, invitation.socket_name.data(), invitation.socket_name.size());
    const auto length =
        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + invitation.socket_name.size());
    connected_ = connect(socket_, reinterpret_cast<sockaddr*>(&address), length) == 0;
  }
  ~Caller() {
    if (socket_ >= 0) close(socket_);
  }

  bool connected_ = false;
  int socket_ = -1;
};

/*! \brief Something that speaks to the hub without being a rank. */
class Client {
 public:
  explicit Client(const SessionServer& server)
      : invitation_(Invitation::Unpack(server.invitation())) {
    Caller connection(invitation_);
    EXPECT(connection.connected_);
    socket_ = std::exchange(connection.socket_, -1);
  }
  ~Client() { Leave(); }

  void Leave() {
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
  }

  void Write(const std::string& bytes) {
    EXPECT(send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size()));
  }

  static std::string Framed(FrameType type, const std::string& payload) {
    return AsBytes(FrameHeader{type, 0, payload.size()}) + payload;
  }

  Hello hello(int rank, int num_ranks, int num_groups = 1) const {
    Hello hello{};
    memcpy(hello.token, invitation_.token.data(), sizeof(hello.token));
    std::string("shm").copy(hello.backend, sizeof(hello.backend) - 1);
    hello.rank = rank;
    hello.num_ranks = num_ranks;
    hello.num_groups = num_groups;
    hello.pid = getpid();
    return hello;
  }

  /*! \brief The next frame of the hub. */
  Frame Answer() {
    Frame frame;
    while (!reader_.Next(&frame)) {
      pollfd polled{socket_, POLLIN, 0};
      EXPECT(poll(&polled, 1, 30000) == 1, "the hub does not answer");
      const bool more = reader_.Read(socket_);
      if (reader_.Next(&frame)) break;
      EXPECT(more, "the hub has closed the connection");
    }
    return frame;
  }

  /*! \brief Say hello, and close the files of the answer. */
  Frame Introduce(const Hello& hello) {
    Write(Framed(FrameType::kHello, AsBytes(hello)));
    return Answer();
  }

  /*! \brief Say hello; whether it was accepted. */
  bool Join(int rank, int num_ranks) {
    return Introduce(hello(rank, num_ranks)).type == FrameType::kWelcome;
  }

  int socket() const { return socket_; }

 private:
  Invitation invitation_;
  int socket_ = -1;
  FrameReader reader_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_CLIENT_H_
