/* SPDX-License-Identifier: Apache-2.0 */
/*! \file worker_handshake.cc */
#include "core/worker_handshake.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "core/atfork_descriptors.h"
#include "core/error.h"
#include "core/frame.h"
#include "core/machine_name_and_memory.h"
#include "core/rank_runtime_state.h"
#include "core/thread_signals.h"
#include "core/worker_socket_to_session_server.h"

namespace tvm_ipc {

namespace {

using Clock = std::chrono::steady_clock;

/*! \brief The time that the session server has to answer. */
constexpr std::chrono::seconds kWelcomeTime{30};

/*! \brief Return 16 random bytes. */
std::string RandomToken() {
  std::string token(sizeof(Hello::token), '\0');
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    Fail(kind::kRuntime, "getrandom: ", strerror(errno));
  }
  return token;
}

std::string Hex(const std::string& bytes) {
  static const char* digits = "0123456789abcdef";
  std::string result;
  for (unsigned char byte : bytes) {
    result += digits[byte >> 4];
    result += digits[byte & 15];
  }
  return result;
}

/*! \brief The first line of a packed list of invitations; an invitation has no such line. */
constexpr char kInvitations[] = "tvm_ipc nodes\n";

/*!
 * \brief Watch the controller, to end a worker process whose controller is gone.
 * \param watched A duplicate of the connection, since the rank closes the original.
 * \param controller The controller's process. It is watched as well, because a process that it has
 *        forked may hold the connection open.
 * \param left Whether the rank has left. Then the process may continue, as a node of a
 * SocketSession does.
 * \param segments The session's memory, which records whether the session was closed. Then Disco
 *        ends the worker or continues to use it.
 * \param gone Called when the controller is gone; ends the process or the rank's waits.
 */
void EndWithController(int watched, int controller, std::shared_ptr<std::atomic<bool>> left,
                       std::shared_ptr<Segments> segments, std::function<void()> gone) {
  const int process = OpenProcess(controller);
  if (process < 0 && errno == ESRCH) gone();
  KeepFromChildren(watched);
  StartThread("the watch over the controller", [watched, process, left, segments, gone] {
    pollfd polled[2] = {{watched, 0, 0}, {process, POLLIN, 0}};
    while (true) {
      if (poll(polled, 2, -1) < 0 && errno == EINTR) continue;
      if (left->load()) break;
      const bool closed = ReasonOf(segments->control().abort.load()) == AbortReason::kClosed;
      if (!closed || polled[1].revents != 0) {
        gone();
        break;
      }
      if (process < 0) break;
      polled[0].fd = -1;  // the session was closed, but the worker has not ended yet
    }
    CloseKept(watched);
    if (process >= 0) close(process);
  }).detach();
}

/*! \brief Connect to the session server, and get the credentials of its process. */
File Connect(const Invitation& invitation, const Backend& backend, int rank, ucred* controller) {
  File connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (connection.get() < 0) {
    Fail(kind::kRuntime, "rank ", rank, " cannot open a socket: ", strerror(errno),
         FilesHint(errno));
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // A leading zero byte puts the name in the abstract namespace: no file, nothing to clean up.
  memcpy(address.sun_path + 1, invitation.socket_name.data(),
         std::min(invitation.socket_name.size(), sizeof(address.sun_path) - 1));
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + invitation.socket_name.size());
  int done;
  do {
    done = connect(connection.get(), reinterpret_cast<sockaddr*>(&address), length);
  } while (done != 0 && errno == EINTR);
  if (done != 0) {
    const int error = errno;
    // A name that could not be read (no descriptors, no /proc) does not mean another machine.
    const std::string machine = ThisMachine();
    if (machine != invitation.machine && machine[0] != ' ' && invitation.machine[0] != ' ') {
      Fail(kind::kRuntime, "rank ", rank, " runs on another machine (", machine,
           ") than the controller (", invitation.machine, "); the ", backend.name(),
           " backend connects workers of one machine only, and so do sockets of Disco's; those of"
           " several machines are connected by tvm_ipc.Session(..., hosts=[...])");
    }
    Fail(kind::kRuntime, "rank ", rank, " cannot reach the controller: ", strerror(error),
         "; both must run in one network namespace of one machine");
  }
  socklen_t size = sizeof(*controller);
  getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, controller, &size);
  if (controller->uid != geteuid()) {
    Fail(kind::kRuntime, "the invitation's socket belongs to user ", controller->uid,
         ", but this worker runs as user ", geteuid());
  }
  return connection;
}

/*! \brief Receive the server's answer; return false if it closed the connection without one. */
bool ReceiveWelcome(Connection& connection, Frame* frame) {
  const auto end = Clock::now() + kWelcomeTime;
  if (!connection.Receive(frame, end)) {
    if (connection.ended()) return false;
    Fail(kind::kRuntime, "the controller did not answer during the start of the session for ",
         kWelcomeTime.count(), " s");
  }
  if (frame->type == FrameType::kRefusal) Fail(kind::kRuntime, frame->payload);
  if (frame->type != FrameType::kWelcome || frame->payload.size() != sizeof(Welcome)) {
    Fail(kind::kRuntime, "the controller's answer was not one of this library");
  }
  if (frame->lost_files) {
    Fail(kind::kRuntime, "the files of the session's memory did not arrive", kMoreFiles);
  }
  return true;
}

}  // namespace

Invitation Invitation::Make() {
  return Invitation{"tvm_ipc." + Hex(RandomToken()), RandomToken(), ThisMachine()};
}

std::string Invitation::Pack() const { return socket_name + '\n' + token + '\n' + machine; }

Invitation Invitation::Unpack(const std::string& bytes) {
  const size_t first = bytes.find('\n');
  // The token is bytes of any value, but of known length.
  if (first == std::string::npos || bytes.size() < first + sizeof(Hello::token) + 2) {
    Fail(kind::kValue, "init_ccl_per_worker: not an invitation of this library: ", bytes.size(),
         " bytes");
  }
  return Invitation{bytes.substr(0, first), bytes.substr(first + 1, sizeof(Hello::token)),
                    bytes.substr(first + 2 + sizeof(Hello::token))};
}

std::string PackInvitations(const std::vector<NodeInvitation>& nodes) {
  std::string text = kInvitations;
  for (const NodeInvitation& node : nodes) {
    text += AsBytes(static_cast<int32_t>(node.ranks)) + PackField(node.invitation);
  }
  return text;
}

Invitation InvitationOf(const std::string& bytes, int rank) {
  constexpr size_t begin = sizeof(kInvitations) - 1;
  if (bytes.compare(0, begin, kInvitations) != 0) return Invitation::Unpack(bytes);
  size_t at = begin;
  int first = 0;
  std::string invitation;
  while (at + sizeof(int32_t) <= bytes.size()) {
    int32_t ranks;
    memcpy(&ranks, bytes.data() + at, sizeof(ranks));
    at += sizeof(ranks);
    if (!TakeField(bytes, &at, &invitation)) break;
    if (rank < first + ranks) return Invitation::Unpack(invitation);
    first += ranks;
  }
  Fail(kind::kValue, "init_ccl_per_worker: no node of the session has a rank ", rank);
}

std::unique_ptr<Rank> Join(const Invitation& invitation, const Backend& backend, int rank,
                           int num_ranks, int num_groups, int device,
                           const Backend& (*find)(const std::string& name), Home home,
                           const std::function<void(Rank&)>& prepare) {
  Hello hello{};
  memcpy(hello.token, invitation.token.data(), sizeof(hello.token));
  std::string(backend.name()).copy(hello.backend, sizeof(hello.backend) - 1);
  hello.rank = rank;
  hello.num_ranks = num_ranks;
  hello.num_groups = num_groups;
  hello.pid = getpid();
  const auto end = Clock::now() + kWelcomeTime;
  ucred controller{};
  auto connection = std::make_shared<Connection>(Connect(invitation, backend, rank, &controller));
  std::unique_ptr<Rank> result;  // its destructor sends the goodbye, after the error is reported
  try {
    Frame answer;
    // The server closes pending connections when there are too many: then try again.
    while (!connection->Send(FrameType::kHello, AsBytes(hello)) ||
           !ReceiveWelcome(*connection, &answer)) {
      if (Clock::now() > end) {
        Fail(kind::kRuntime, "the controller closed every connection for ", kWelcomeTime.count(),
             " s during the start of the session");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      connection = std::make_shared<Connection>(Connect(invitation, backend, rank, &controller));
    }
    Welcome welcome;
    memcpy(&welcome, answer.payload.data(), sizeof(welcome));
    const std::vector<int> files = Descriptors(answer.files);
    auto segments =
        Segments::Map(invitation.token, files[0], std::vector<int>(files.begin() + 1, files.end()));
    RankOptions options;
    options.deadline = std::chrono::nanoseconds(welcome.deadline_ns);
    options.wait = WaitPolicy{welcome.spins, welcome.yields};
    options.instruction_set = welcome.instruction_set;
    options.flat = welcome.flat != 0;
    options.device = device;
    const bool elsewhere = controller.pid != getpid();
    File watched(elsewhere ? connection->Duplicate() : -1);
    if (elsewhere && watched.get() < 0) {
      Fail(kind::kRuntime, "rank ", rank, " cannot watch the controller: ", strerror(errno),
           FilesHint(errno));
    }
    // A backend may have no segments.
    const size_t own = 1 + static_cast<size_t>(rank - segments->control().first_here);
    File segment = own < files.size() ? std::move(answer.files[own]) : File();
    result = std::make_unique<Rank>(rank, segments, options, connection, std::move(segment));
    if (elsewhere) {
      EndWithController(watched.Give(), controller.pid, result->left(), segments, [=] {
        if (home == Home::kOwn) _exit(1);
        Control& control = segments->control();
        Abort(control, AbortReason::kNodeLost, control.NodeOf(rank));
      });
    }
    answer.files.clear();
    std::string changed;
    if (prepare) prepare(*result);
    try {
      result->Start(backend);
    } catch (const CannotConnect& error) {
      if (find == nullptr || welcome.otherwise[0] == '\0') throw;
      // All ranks do this, because they agreed that the first backend cannot connect them.
      result->Start(find(welcome.otherwise));
      changed = Text(welcome.otherwise, '\n', error.what());
    }
    connection->Send(FrameType::kJoined, changed);
    return result;
  } catch (const Error& error) {
    connection->Send(FrameType::kError, PackError(error.kind(), error.what(), ""));
    throw;
  }
}

}  // namespace tvm_ipc
