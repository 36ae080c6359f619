/* SPDX-License-Identifier: Apache-2.0 */
/*! \file rendezvous.cc */
#include "core/rendezvous.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/forked.h"
#include "core/frame.h"

namespace tvm_ipc {

namespace {

using Clock = std::chrono::steady_clock;

/*! \brief Strangers at a time: all workers of a session at once, and as many others. */
constexpr size_t kMaxStrangers = 2 * kMaxRanks;
/*! \brief How long a stranger may take to say who it is. */
constexpr std::chrono::seconds kStrangerTime{10};
/*! \brief How long to leave connections waiting when there is no descriptor, and how often. */
constexpr int kNoDescriptorMs = 50;
constexpr int kMaxNoDescriptor = 20;

}  // namespace

Rendezvous::Rendezvous(const std::string& backend, const Welcome& welcome, std::vector<File> files,
                       Control& control, Monitor& monitor)
    : backend_(backend),
      welcome_(welcome),
      files_(std::move(files)),
      control_(control),
      monitor_(monitor),
      invitation_(Invitation::Make()),
      admitted_(control.num_ranks) {
  for (int rank = 0; rank < control.num_ranks; ++rank) admitted_[rank] = !control.IsHere(rank);
  try {
    if (control.ranks_here > 0) Listen();
  } catch (...) {
    CloseDoor();
    throw;
  }
}

Rendezvous::~Rendezvous() { CloseDoor(); }

void Rendezvous::Listen() {
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path + 1, invitation_.socket_name.data(), invitation_.socket_name.size());
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + invitation_.socket_name.size());
  if (listener_ < 0 || bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener_, kMaxRanks) != 0) {
    Fail(kind::kRuntime, "cannot listen for workers: ", strerror(errno), FilesHint(errno));
  }
  KeepFromChildren(listener_);
}

int Rendezvous::Watch(std::vector<pollfd>* polled) {
  const bool descriptors = std::exchange(descriptors_, true);
  if (listener_ >= 0 && descriptors) polled->push_back({listener_, POLLIN, 0});
  for (const Stranger& stranger : strangers_) polled->push_back({stranger.socket, POLLIN, 0});
  if (!descriptors) return kNoDescriptorMs;
  if (strangers_.empty()) return -1;
  const auto left = strangers_.front().came + kStrangerTime - Clock::now();
  return std::max<int>(0, std::chrono::ceil<std::chrono::milliseconds>(left).count()) + 1;
}

void Rendezvous::Serve(int file) {
  if (file != listener_) return Hear(file);
  descriptors_ = Accept();
  without_ = descriptors_ ? 0 : without_ + 1;
  if (without_ == kMaxNoDescriptor) {
    monitor_.Refuse(Text("the controller has no descriptor for a connection", kMoreFiles));
  }
}

void Rendezvous::Tidy() {
  bool crowded = !descriptors_;
  while (!strangers_.empty() &&
         (std::exchange(crowded, false) || strangers_.size() > kMaxStrangers ||
          Clock::now() - strangers_.front().came > kStrangerTime)) {
    CloseKept(strangers_.front().socket);
    strangers_.erase(strangers_.begin());
  }
}

/*! \brief Let somebody in; false when there is no descriptor left for anybody. */
bool Rendezvous::Accept() {
  const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (socket < 0) return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
  ucred peer{};
  socklen_t size = sizeof(peer);
  getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size);
  if (peer.uid != geteuid()) {  // anybody may connect to an abstract socket
    close(socket);
    return true;
  }
  KeepFromChildren(socket);
  strangers_.push_back({socket, Clock::now(), ""});
  return true;
}

void Rendezvous::Hear(int socket) {
  struct {
    FrameHeader header;
    Hello hello;
  } request;
  auto stranger = std::find_if(strangers_.begin(), strangers_.end(),
                               [&](const Stranger& one) { return one.socket == socket; });
  if (stranger == strangers_.end()) return;  // the door was closed meanwhile
  char bytes[sizeof(request)];
  const ssize_t got = recv(socket, bytes, sizeof(request) - stranger->said.size(), 0);
  if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return;
  if (got > 0) stranger->said.append(bytes, static_cast<size_t>(got));
  const bool whole = stranger->said.size() == sizeof(request);
  if (got > 0 && !whole) return;
  if (whole) memcpy(&request, stranger->said.data(), sizeof(request));
  strangers_.erase(stranger);
  if (whole && request.header.type == FrameType::kHello) {
    const Hello& hello = request.hello;
    if (memcmp(hello.token, invitation_.token.data(), sizeof(hello.token)) == 0) {
      return Admit(socket, hello);
    }
    SendFrame(socket, FrameType::kRefusal, "the token is not this session's");
  }
  CloseKept(socket);  // none of ours, and nothing to this session
}

std::string Rendezvous::Check(const Hello& hello) const {
  const int n = control_.num_ranks;
  const int groups = control_.num_groups;  // 0 until the first worker says it
  const std::string backend(hello.backend, strnlen(hello.backend, sizeof(hello.backend)));
  if (backend != backend_) {
    return Text("rank ", hello.rank, " was started for the backend ", backend, ", the session has ",
                backend_);
  }
  if (hello.num_ranks != n || (groups != 0 && hello.num_groups != groups)) {
    return Text("rank ", hello.rank, " was started for ", hello.num_ranks, " workers in ",
                hello.num_groups, " groups, the session has ", n, " in ", groups);
  }
  if (hello.num_groups < 1 || n % hello.num_groups != 0) {
    return Text(n, " workers cannot be divided into ", hello.num_groups, " groups");
  }
  if (hello.rank < 0 || hello.rank >= n) return Text("there is no rank ", hello.rank);
  if (!control_.IsHere(hello.rank)) {
    return Text("rank ", hello.rank, " is none of this node's, which are ", control_.first_here,
                " to ", control_.first_here + control_.ranks_here - 1);
  }
  if (admitted_[hello.rank]) return Text("rank ", hello.rank, " has joined already");
  return "";
}

/*! \brief Give a worker the files, or the reason why not. */
void Rendezvous::Admit(int socket, const Hello& hello) {
  // What is written from here on may wait; the monitor says where it must not.
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) & ~O_NONBLOCK);
  std::string refusal = Check(hello);
  if (refusal.empty()) {
    if (control_.num_groups == 0) control_.num_groups = hello.num_groups;
    // All known before the rank itself can say anything: it may leave or die at once.
    control_.ranks[hello.rank].pid.store(hello.pid, std::memory_order_relaxed);
    monitor_.Add(hello.rank, hello.pid, socket);
    errno = 0;
    if (!SendFrame(socket, FrameType::kWelcome, AsBytes(welcome_), Descriptors(files_))) {
      refusal = Text("the files of the shared memory could not be sent: ", strerror(errno),
                     errno == ETOOMANYREFS ? kMoreFiles : "");
      monitor_.Remove(hello.rank);
    }
  }
  if (!refusal.empty()) {
    SendFrame(socket, FrameType::kRefusal, refusal);
    CloseKept(socket);
    monitor_.Refuse(refusal);
    return;
  }
  admitted_[hello.rank] = true;
  // Nobody else comes: what is mapped stays, the files need no names here.
  if (std::find(admitted_.begin(), admitted_.end(), false) == admitted_.end()) CloseDoor();
}

void Rendezvous::CloseDoor() {
  for (const Stranger& stranger : strangers_) CloseKept(stranger.socket);
  strangers_.clear();
  files_.clear();
  CloseKept(std::exchange(listener_, -1));
}

}  // namespace tvm_ipc
