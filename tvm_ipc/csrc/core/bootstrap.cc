/* SPDX-License-Identifier: Apache-2.0 */
/*! \file bootstrap.cc */
#include "core/bootstrap.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <thread>

#include "core/forked.h"
#include "core/group.h"

namespace tvm_ipc {

namespace {

/*! \brief How long the hub may take to answer. */
constexpr int kWelcomeSeconds = 30;

const char* FilesHint(int error) { return error == EMFILE || error == ENFILE ? kMoreFiles : ""; }

bool SendAll(int socket, const void* data, size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(socket, next, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    next += sent;
    bytes -= static_cast<size_t>(sent);
  }
  return true;
}

/*! \brief The hub's answer; false if it closed the connection without one. */
bool ReceiveWelcome(int socket, Welcome* answer, std::vector<int>* files) {
  const timeval limit{kWelcomeSeconds, 0};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  Welcome& welcome = *answer;
  iovec data{&welcome, sizeof(welcome)};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int) * (kMaxRanks + 1))];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof(space);
  ssize_t got;
  do {
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
  } while (got < 0 && errno == EINTR);
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    files->resize(count);
    memcpy(files->data(), CMSG_DATA(part), count * sizeof(int));
  }
  if (got == 0 || (got < 0 && errno == ECONNRESET)) return false;
  if (got != sizeof(welcome)) {
    Fail(kind::kRuntime, "the controller did not answer during the start of the session: ",
         got < 0 ? strerror(errno) : "it stopped half-way");
  }
  if (!welcome.accepted) Fail(kind::kRuntime, welcome.reason);
  if (static_cast<size_t>(welcome.num_files) != files->size()) {
    Fail(kind::kRuntime, "the session's memory needs ", welcome.num_files, " files, but ",
         files->size(), " arrived", kMoreFiles);
  }
  return true;
}

/*!
 * \brief Ends a worker process whose controller is gone: nobody else would.
 * \param watched The connection under a number of its own, since the rank closes the other.
 * \param controller The process: its end shows there when another one that it forked holds the
 *        connection open.
 * \param left Whether the rank said goodbye; the process may go on then, as a node of a
 *        SocketSession does.
 * \param segments The session's, which say whether it was closed; Disco ends the worker then, or
 *        uses it on.
 */
void EndWithController(int watched, int controller, std::shared_ptr<std::atomic<bool>> left,
                       std::shared_ptr<Segments> segments) {
  const int process = OpenProcess(controller);
  if (process < 0 && errno == ESRCH) _exit(1);
  KeepFromChildren(watched);
  StartThread("the watch over the controller", [watched, process, left, segments] {
    pollfd polled[2] = {{watched, 0, 0}, {process, POLLIN, 0}};
    while (true) {
      if (poll(polled, 2, -1) < 0 && errno == EINTR) continue;
      if (left->load()) break;
      const uint32_t abort = segments->control().abort.load();
      const bool closed = (abort & 0xff) == static_cast<uint32_t>(AbortReason::kClosed);
      if (!closed || polled[1].revents != 0) _exit(1);
      if (process < 0) break;
      polled[0].fd = -1;  // closed, but the worker has not come to its end yet
    }
    CloseKept(watched);
    if (process >= 0) close(process);
  }).detach();
}

}  // namespace

int OpenProcess(int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  return -1;
#endif
}

bool frame::Send(int socket, uint32_t type, const std::string& payload) {
  const Header header{type, 0, payload.size()};
  return SendAll(socket, &header, sizeof(header)) &&
         SendAll(socket, payload.data(), payload.size());
}

namespace {

/*! \brief The most bytes of a text that a rank sends home. */
constexpr size_t kLongestText = size_t{1} << 20;

/*! \brief A text without the bytes between its first half and its last that nobody can read. */
std::string Shortened(const std::string& text) {
  if (text.size() <= kLongestText) return text;
  auto inside_a_character = [&](size_t at) { return (text[at] & 0xC0) == 0x80; };
  size_t left = kLongestText / 2, right = text.size() - kLongestText / 2;
  while (left > 0 && inside_a_character(left)) --left;
  while (right < text.size() && inside_a_character(right)) ++right;
  return Text(text.substr(0, left), "\n... [", right - left, " of ", text.size(),
              " bytes are left out here] ...\n", text.substr(right));
}

}  // namespace

std::string PackError(const std::string& kind, const std::string& message,
                      const std::string& traceback) {
  std::string payload;
  for (const std::string& field : {kind, Shortened(message), Shortened(traceback)}) {
    const uint64_t bytes = field.size();
    payload.append(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
    payload += field;
  }
  return payload;
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

std::string ThisMachine() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  return boot + " " + host;
}

std::string RandomToken() {
  std::string token(sizeof(Hello::token), '\0');
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    Fail(kind::kRuntime, "getrandom: ", strerror(errno));
  }
  return token;
}

bool SendWelcome(int socket, const Welcome& welcome, const std::vector<int>& files) {
  Welcome copy = welcome;
  iovec data{&copy, sizeof(copy)};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int) * (kMaxRanks + 1))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!files.empty()) {
    message.msg_control = space;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * files.size());
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int) * files.size());
    memcpy(CMSG_DATA(part), files.data(), sizeof(int) * files.size());
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(copy));
}

namespace {

/*! \brief A connection to the hub, and who is at its other end. */
int Connect(const Invitation& invitation, int rank, ucred* controller) {
  const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connection < 0) {
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
    done = connect(connection, reinterpret_cast<sockaddr*>(&address), length);
  } while (done != 0 && errno == EINTR);
  if (done != 0) {
    const int error = errno;
    close(connection);
    // A machine whose name cannot be read, for want of descriptors or of /proc, is no other one.
    const std::string machine = ThisMachine();
    if (machine != invitation.machine && machine[0] != ' ' && invitation.machine[0] != ' ') {
      Fail(kind::kRuntime, "rank ", rank, " runs on another machine (", machine,
           ") than the controller (", invitation.machine,
           "); the shm backend connects workers of one machine only");
    }
    Fail(kind::kRuntime, "rank ", rank, " cannot reach the controller: ", strerror(error),
         "; both must run in one network namespace of one machine");
  }
  socklen_t size = sizeof(*controller);
  getsockopt(connection, SOL_SOCKET, SO_PEERCRED, controller, &size);
  if (controller->uid != geteuid()) {
    close(connection);
    Fail(kind::kRuntime, "the invitation's socket belongs to user ", controller->uid,
         ", but this worker runs as user ", geteuid());
  }
  return connection;
}

}  // namespace

std::unique_ptr<Rank> Join(const Invitation& invitation, int rank, int num_ranks, int num_groups) {
  Hello hello{};
  memcpy(hello.token, invitation.token.data(), sizeof(hello.token));
  hello.rank = rank;
  hello.num_ranks = num_ranks;
  hello.num_groups = num_groups;
  hello.pid = getpid();
  const std::string greeting(reinterpret_cast<char*>(&hello), sizeof(hello));
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(kWelcomeSeconds);
  ucred controller{};
  int connection = Connect(invitation, rank, &controller);
  std::vector<int> files;
  std::unique_ptr<Rank> result;
  try {
    Welcome welcome{};
    // The hub turns out who has not said hello yet when too many others come: then once more.
    while (!frame::Send(connection, frame::kHello, greeting) ||
           !ReceiveWelcome(connection, &welcome, &files)) {
      if (std::chrono::steady_clock::now() > end) {
        Fail(kind::kRuntime, "the controller closed every connection for ", kWelcomeSeconds,
             " s during the start of the session");
      }
      close(std::exchange(connection, -1));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      connection = Connect(invitation, rank, &controller);
    }
    const timeval forever{0, 0};
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &forever, sizeof(forever));

    auto segments =
        Segments::Map(invitation.token, files[0], std::vector<int>(files.begin() + 1, files.end()));
    RankOptions options;
    options.deadline = std::chrono::nanoseconds(welcome.deadline_ns);
    options.wait = WaitPolicy{welcome.spins, welcome.yields};
    options.instruction_set = welcome.instruction_set;
    const bool elsewhere = controller.pid != getpid();
    const int watched = elsewhere ? fcntl(connection, F_DUPFD_CLOEXEC, 0) : -1;
    if (elsewhere && watched < 0) {
      Fail(kind::kRuntime, "rank ", rank, " cannot watch the controller: ", strerror(errno),
           FilesHint(errno));
    }
    const int own_segment = files[1 + rank];
    files[1 + rank] = -1;
    result = std::make_unique<Rank>(rank, segments, options, connection, own_segment);
    if (elsewhere) EndWithController(watched, controller.pid, result->left(), segments);
    for (int& file : files) {
      if (file >= 0) close(std::exchange(file, -1));
    }
    result->SendFrame(frame::kJoined, "");
    return result;
  } catch (const Error& error) {
    for (int file : files) {
      if (file >= 0) close(file);
    }
    frame::Send(connection, frame::kError, PackError(error.kind(), error.what(), ""));
    if (result == nullptr && connection >= 0) close(connection);
    throw;
  }
}

}  // namespace tvm_ipc
