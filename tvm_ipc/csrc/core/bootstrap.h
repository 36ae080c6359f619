/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file bootstrap.h
 * \brief How the ranks of a session meet: an invitation, one Unix socket each, passed files.
 *
 * The controller's hub listens on an abstract Unix socket with a random name. Disco carries the
 * invitation (socket name, random token, machine) to every worker. A worker connects and says
 * hello with the token; the hub checks the token and that the peer is the same user, and answers
 * with the memory files. A worker that has mapped them has joined. The socket then carries frames
 * to the hub until the worker says goodbye; its end without a goodbye is the worker's death.
 */
#ifndef TVM_IPC_CORE_BOOTSTRAP_H_
#define TVM_IPC_CORE_BOOTSTRAP_H_

#include <signal.h>

#include <cstdint>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"

namespace tvm_ipc {

class Rank;

namespace frame {
/*! \brief Types of frames that a worker sends; the payload is bytes. */
constexpr uint32_t kHello = 1;
constexpr uint32_t kDone = 2;
constexpr uint32_t kError = 3;
constexpr uint32_t kValue = 4;
constexpr uint32_t kBye = 5;
constexpr uint32_t kJoined = 6;

struct Header {
  uint32_t type;
  uint32_t reserved;
  uint64_t bytes;
};

/*! \brief Send a whole frame; false when the other side is gone. */
bool Send(int socket, uint32_t type, const std::string& payload);
}  // namespace frame

/*! \brief A worker's error as the payload of a frame; of a very long text the middle is left out.
 */
std::string PackError(const std::string& kind, const std::string& message,
                      const std::string& traceback);

struct Hello {
  char token[16];
  int32_t rank;
  int32_t num_ranks;
  int32_t num_groups;
  int32_t pid;
};

/*! \brief What the hub answers, together with the files. */
struct Welcome {
  int32_t accepted;
  int32_t num_files;
  int64_t deadline_ns;
  uint32_t spins;
  uint32_t yields;
  char instruction_set[16];
  /*! \brief Why not, if not accepted. */
  char reason[256];
};

struct Invitation {
  std::string socket_name;
  std::string token;
  /*! \brief Boot id and host name of the controller's machine. */
  std::string machine;

  std::string Pack() const;
  static Invitation Unpack(const std::string& bytes);
};

/*! \brief A file that is readable once the process has ended; -1 where there is no such thing. */
int OpenProcess(int pid);

/*!
 * \brief While it lives, a new thread starts without signals: they belong to the program's own
 *        threads, which know how to go on after them.
 */
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

/*! \brief A new thread without signals, or an error that says what could not be started. */
template <typename Function>
std::thread StartThread(const char* what, Function function) {
  BlockSignals blocked;
  try {
    return std::thread(std::move(function));
  } catch (const std::system_error& error) {
    Fail(kind::kRuntime, "cannot start the thread of ", what, ": ", error.what(),
         "; a higher limit of processes helps (RLIMIT_NPROC, pids.max of the container)");
  }
}

/*! \brief What to say where a process has no descriptor left. */
constexpr const char* kMoreFiles =
    "; a higher limit of open files helps (RLIMIT_NOFILE, `ulimit -n`)";

/*! \brief Boot id and host name of this machine. */
std::string ThisMachine();
/*! \brief 16 bytes nobody else knows. */
std::string RandomToken();

/*! \brief Send the header and the files over a Unix socket; false when the other side is gone. */
bool SendWelcome(int socket, const Welcome& welcome, const std::vector<int>& files);

/*!
 * \brief Accept the invitation: connect, map the memory, become a rank of the session.
 *
 * In a process other than the controller's a thread watches the connection from now on and ends
 * the process when the controller is gone.
 */
std::unique_ptr<Rank> Join(const Invitation& invitation, int rank, int num_ranks, int num_groups);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_BOOTSTRAP_H_
