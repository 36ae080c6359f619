/* SPDX-License-Identifier: Apache-2.0 */
/*! \file admit_workers_to_session.cc */
#include "core/admit_workers_to_session.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "core/atfork_descriptors.h"
#include "core/error.h"
#include "core/frame.h"

namespace tvm_ipc {

namespace {

using Clock = std::chrono::steady_clock;

/*! \brief The maximum number of pending peers: all workers of a session, and as many others. */
constexpr size_t kMaxPendingPeers = 2 * kMaxRanks;
/*! \brief The time that a pending peer has to send its hello. */
constexpr std::chrono::seconds kPendingTime{10};
/*! \brief The time to leave connections waiting if there is no free descriptor, and the number of
 *         such failures in a row after which they are reported. */
constexpr int kNoDescriptorMs = 50;
constexpr int kMaxNoDescriptor = 20;

}  // namespace

Admission::Admission(const std::string& backend, const Welcome& welcome, std::vector<File> files,
                     Control& control, WorkerTable& worker_table)
    : backend_(backend),
      welcome_(welcome),
      files_(std::move(files)),
      control_(control),
      worker_table_(worker_table),
      invitation_(Invitation::Make()),
      admitted_(control.num_ranks) {
  for (int rank = 0; rank < control.num_ranks; ++rank) admitted_[rank] = !control.IsHere(rank);
  try {
    if (control.ranks_here > 0) Listen();
  } catch (...) {
    CloseListener();
    throw;
  }
}

Admission::~Admission() { CloseListener(); }

void Admission::Listen() {
  listener_ = AboveStandardStreams(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
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

int Admission::Watch(std::vector<pollfd>* polled) {
  const bool descriptors = std::exchange(has_descriptors_, true);
  if (listener_ >= 0 && descriptors) polled->push_back({listener_, POLLIN, 0});
  for (const PendingPeer& pending_peer : pending_peers_)
    polled->push_back({pending_peer.socket, POLLIN, 0});
  if (!descriptors) return kNoDescriptorMs;
  if (pending_peers_.empty()) return -1;
  const auto left = pending_peers_.front().arrived + kPendingTime - Clock::now();
  return std::max<int>(0, std::chrono::ceil<std::chrono::milliseconds>(left).count()) + 1;
}

void Admission::Serve(int file) {
  if (file != listener_) return Receive(file);
  has_descriptors_ = Accept();
  failed_accepts_ = has_descriptors_ ? 0 : failed_accepts_ + 1;
  if (failed_accepts_ == kMaxNoDescriptor) {
    worker_table_.Refuse(Text("the controller has no descriptor for a connection", kMoreFiles));
  }
}

void Admission::Tidy() {
  bool crowded = !has_descriptors_;
  while (!pending_peers_.empty() &&
         (std::exchange(crowded, false) || pending_peers_.size() > kMaxPendingPeers ||
          Clock::now() - pending_peers_.front().arrived > kPendingTime)) {
    CloseKept(pending_peers_.front().socket);
    pending_peers_.erase(pending_peers_.begin());
  }
}

/*! \brief Accept a connection; return false if there is no descriptor left. */
bool Admission::Accept() {
  const int socket =
      AboveStandardStreams(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket < 0) return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
  ucred peer{};
  socklen_t size = sizeof(peer);
  getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size);
  if (peer.uid != geteuid()) {  // any user may connect to an abstract socket
    close(socket);
    return true;
  }
  KeepFromChildren(socket);
  pending_peers_.push_back({socket, Clock::now(), ""});
  return true;
}

void Admission::Receive(int socket) {
  struct {
    FrameHeader header;
    Hello hello;
  } request;
  auto pending_peer = std::find_if(pending_peers_.begin(), pending_peers_.end(),
                                   [&](const PendingPeer& peer) { return peer.socket == socket; });
  if (pending_peer == pending_peers_.end()) return;  // the listener was closed meanwhile
  char bytes[sizeof(request)];
  const ssize_t got = recv(socket, bytes, sizeof(request) - pending_peer->received.size(), 0);
  if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return;
  if (got > 0) pending_peer->received.append(bytes, static_cast<size_t>(got));
  const bool whole = pending_peer->received.size() == sizeof(request);
  if (got > 0 && !whole) return;
  if (whole) memcpy(&request, pending_peer->received.data(), sizeof(request));
  pending_peers_.erase(pending_peer);
  if (whole && request.header.type == FrameType::kHello) {
    const Hello& hello = request.hello;
    if (memcmp(hello.token, invitation_.token.data(), sizeof(hello.token)) == 0) {
      return Admit(socket, hello);
    }
    SendFrame(socket, FrameType::kRefusal, "the token is not this session's");
  }
  CloseKept(socket);  // not a worker of this library; the session ignores it
}

std::string Admission::Check(const Hello& hello) const {
  const int n = control_.num_ranks;
  const int groups = control_.num_groups;  // 0 until the first worker sends it
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
    return Text("rank ", hello.rank, " does not belong to this node, which has the ranks ",
                control_.first_here, " to ", control_.first_here + control_.ranks_here - 1);
  }
  if (admitted_[hello.rank]) return Text("rank ", hello.rank, " has already joined");
  return "";
}

/*! \brief Send a worker the files, or the reason why it is refused. */
void Admission::Admit(int socket, const Hello& hello) {
  // From here on writes may block; the worker table uses MSG_DONTWAIT where they must not.
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) & ~O_NONBLOCK);
  std::string refusal = Check(hello);
  if (refusal.empty()) {
    if (control_.num_groups == 0) control_.num_groups = hello.num_groups;
    // Recorded before the rank can send anything: it may leave or die at once.
    control_.ranks[hello.rank].pid.store(hello.pid, std::memory_order_relaxed);
    worker_table_.Add(hello.rank, hello.pid, socket);
    errno = 0;
    if (!SendFrame(socket, FrameType::kWelcome, AsBytes(welcome_), Descriptors(files_))) {
      refusal = Text("the files of the shared memory could not be sent: ", strerror(errno),
                     errno == ETOOMANYREFS ? kMoreFiles : "");
      worker_table_.Remove(hello.rank);
    }
  }
  if (!refusal.empty()) {
    SendFrame(socket, FrameType::kRefusal, refusal);
    CloseKept(socket);
    worker_table_.Refuse(refusal);
    return;
  }
  admitted_[hello.rank] = true;
  // All ranks have joined: mappings stay, and the descriptors are no longer needed.
  if (std::find(admitted_.begin(), admitted_.end(), false) == admitted_.end()) CloseListener();
}

void Admission::CloseListener() {
  for (const PendingPeer& pending_peer : pending_peers_) CloseKept(pending_peer.socket);
  pending_peers_.clear();
  files_.clear();
  CloseKept(std::exchange(listener_, -1));
}

}  // namespace tvm_ipc
