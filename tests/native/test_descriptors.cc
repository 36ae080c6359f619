/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_descriptors.cc
 * \brief A program without standard streams, and pipes and sockets that nobody reads.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "client.h"
#include "core/file_descriptor_and_memory_file.h"
#include "core/frame.h"
#include "core/rank_runtime_state.h"
#include "core/thread_signals.h"
#include "expect.h"

namespace tvm_ipc {
namespace {

bool IsOpen(int descriptor) { return fcntl(descriptor, F_GETFD) >= 0; }

/*! \brief While it lives, the process has no standard streams. */
class NoStandardStreams {
 public:
  NoStandardStreams() {
    for (int stream = 0; stream <= 2; ++stream) {
      kept_[stream] = DuplicateFile(stream);
      close(stream);
    }
  }
  ~NoStandardStreams() {
    for (int stream = 0; stream <= 2; ++stream) {
      if (kept_[stream] >= 0) dup2(kept_[stream], stream);
      close(kept_[stream]);
    }
  }

 private:
  int kept_[3];
};

void TestFilesAreAboveStandardStreams() {
  int numbers[4];
  bool low = false, inherited = false;
  {
    NoStandardStreams closed;
    File opened(open("/dev/null", O_RDONLY | O_CLOEXEC));
    File memory = MakeMemoryFile("tvm_ipc test", 1 << 12);
    File process(OpenProcess(getpid()));
    File copy(DuplicateFile(memory.get()));
    numbers[0] = opened.get();
    numbers[1] = memory.get();
    numbers[2] = process.get();
    numbers[3] = copy.get();
    for (int number : numbers) inherited |= (fcntl(number, F_GETFD) & FD_CLOEXEC) == 0;
    for (int stream = 0; stream <= 2; ++stream) low |= IsOpen(stream);
  }
  for (int number : numbers) EXPECT(number > 2, "descriptor ", number);
  EXPECT(!low);
  EXPECT(!inherited);
}

/*! \brief No number is free but those of standard streams. */
void TestFileThatCannotBeMoved() {
  rlimit limit{};
  EXPECT(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  int moved = 0, error = 0;
  bool low = false;
  {
    NoStandardStreams closed;
    const rlimit low_limit{3, limit.rlim_max};
    setrlimit(RLIMIT_NOFILE, &low_limit);
    moved = AboveStandardStreams(open("/dev/null", O_RDONLY | O_CLOEXEC));
    error = errno;
    setrlimit(RLIMIT_NOFILE, &limit);
    for (int stream = 0; stream <= 2; ++stream) low |= IsOpen(stream);
  }
  EXPECT(moved == -1, moved);
  EXPECT(error == EINVAL || error == EMFILE, error);  // EINVAL: 3 itself is beyond the limit
  EXPECT(!low);
}

/*! \brief Neither does a hub take them, nor what comes to it or to its workers. */
void TestSessionAboveStandardStreams() {
  bool low = false, joined = false;
  auto look = [&] {
    for (int stream = 0; stream <= 2; ++stream) low |= IsOpen(stream);
  };
  {
    NoStandardStreams closed;
    SessionServer server(Options(1));
    look();
    const Backend& backend = FindBackend("shm");
    auto rank = Join(InvitationOf(server.invitation(), 0), backend, 0, 1, 1, 0, FindBackend,
                     Home::kController);
    joined = server.worker_table().WaitJoined(30);
    look();
  }
  EXPECT(joined);
  EXPECT(!low);
}

/*! \brief The program has the default action for SIGPIPE, which ends it. */
void TestBrokenPipes() {
  signal(SIGPIPE, SIG_DFL);
  int ends[2], sockets[2];
  EXPECT(pipe2(ends, O_CLOEXEC) == 0);
  EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
  close(ends[0]);
  close(sockets[0]);
  const char byte = 1;
  {
    BlockSigpipe blocked;
    EXPECT(write(ends[1], &byte, 1) == -1 && errno == EPIPE);
    EXPECT(write(sockets[1], &byte, 1) == -1 && errno == EPIPE);
    BlockSigpipe within;
    EXPECT(write(ends[1], &byte, 1) == -1 && errno == EPIPE);
  }
  EXPECT(!SendFrame(sockets[1], FrameType::kBye, "") && errno == EPIPE);
  // Nothing is left to arrive, and the program is as it was.
  sigset_t set;
  sigpending(&set);
  EXPECT(!sigismember(&set, SIGPIPE));
  pthread_sigmask(SIG_BLOCK, nullptr, &set);
  EXPECT(!sigismember(&set, SIGPIPE));
  EXPECT(signal(SIGPIPE, SIG_DFL) == SIG_DFL);
  close(ends[1]);
  close(sockets[1]);
}

/*! \brief A signal that the program itself holds back stays there. */
void TestPendingSigpipeOfTheProgram() {
  sigset_t pipe_signal, before, pending;
  sigemptyset(&pipe_signal);
  sigaddset(&pipe_signal, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe_signal, &before);
  raise(SIGPIPE);
  {
    BlockSigpipe blocked;
  }
  sigpending(&pending);
  EXPECT(sigismember(&pending, SIGPIPE));
  int taken = 0;
  sigwait(&pipe_signal, &taken);
  EXPECT(taken == SIGPIPE);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace
}  // namespace tvm_ipc

int main() {
  tvm_ipc::TestFilesAreAboveStandardStreams();
  tvm_ipc::TestFileThatCannotBeMoved();
  tvm_ipc::TestSessionAboveStandardStreams();
  tvm_ipc::TestBrokenPipes();
  tvm_ipc::TestPendingSigpipeOfTheProgram();
  std::printf("passed\n");
  return 0;
}
