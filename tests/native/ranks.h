/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file ranks.h
 * \brief A session without Disco: a hub, and ranks that are threads of this process or children
 *        of it. The controller orders rounds; a rank does a round as a worker does a command:
 *        it catches, reports, fails the session, and passes the ticket all the same.
 */
#ifndef TVM_IPC_TESTS_RANKS_H_
#define TVM_IPC_TESTS_RANKS_H_

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends.h"
#include "collective_calls.h"
#include "core/rank_runtime_state.h"
#include "core/session_server.h"
#include "core/worker_handshake.h"
#include "expect.h"
#include "shm/collectives.h"

namespace tvm_ipc {

/*!
 * \brief The timeout in seconds of sessions in which a rank is late on purpose. The other ranks
 * must keep it on a busy machine, where a thread can wait for a core for half a second.
 */
constexpr double kShortTimeout = 3;

/*! \brief All errors of a round; "" if there were none. */
inline std::string ErrorsAsText(const std::vector<RankReport>& reports) {
  std::string text;
  for (const RankReport& one : reports) {
    text += Text("rank ", one.rank, ": ", one.kind, ": ", one.message, "; ");
  }
  return text;
}

/*! \brief Expect that the reports of a round are empty, and print them otherwise. */
#define EXPECT_NO_ERROR(reports)                              \
  do {                                                        \
    const std::string errors_as_text = ErrorsAsText(reports); \
    EXPECT(errors_as_text.empty(), errors_as_text);           \
  } while (0)

/*! \brief What the controller wants of all ranks in a round. */
struct Order {
  int32_t action = 0;
  int32_t last = 0;
  uint64_t seed = 0;
  uint64_t ticket = 0;
};

[[noreturn]] inline void Die(const std::string& why) {
  std::printf("FAILED: %s\n", why.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

class Ranks {
 public:
  using Body = std::function<void(Rank&, const Order&)>;
  enum class Kind { kThreads, kProcesses };

  /*! \brief Processes are forked before the hub has its thread, so make it the only session. */
  Ranks(Kind kind, SessionServerOptions options, int num_groups, Body body)
      : num_ranks_(options.num_ranks), num_groups_(num_groups), body_(std::move(body)) {
    if (options.backend == nullptr) options.backend = &FindBackend("shm");
    backend_ = options.backend;
    orders_.resize(num_ranks_, {-1, -1});
    for (auto& pipe_ends : orders_) {
      int ends[2];
      if (pipe(ends) != 0) Die("pipe");
      pipe_ends = {ends[0], ends[1]};
    }
    if (kind == Kind::kProcesses) {
      for (int rank = 0; rank < num_ranks_; ++rank) {
        std::fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
          Serve(rank);
          usleep(20000);  // what watches the controller must not take the goodbye for its end
          std::_Exit(0);
        }
        children_.push_back(child);
      }
    }
    server_ = std::make_unique<SessionServer>(options);
    const std::string invitation = server_->invitation();
    for (auto& pipe_ends : orders_) {
      const size_t size = invitation.size();
      Write(pipe_ends.second, &size, sizeof(size));
      Write(pipe_ends.second, invitation.data(), size);
    }
    if (kind == Kind::kThreads) {
      for (int rank = 0; rank < num_ranks_; ++rank) {
        threads_.emplace_back([this, rank] { Serve(rank); });
      }
    }
    if (!server_->worker_table().WaitJoined(60)) Die("the ranks did not join");
  }

  ~Ranks() {
    if (given_up_) return;
    Order order;
    order.last = 1;
    Send(order);
    for (std::thread& thread : threads_) thread.join();
    if (!server_->worker_table().WaitLeft(60)) Die("the ranks did not leave");
    if (!server_->worker_table().Report().dead.empty())
      Die("a rank that said goodbye counts as dead");
    for (pid_t child : children_) {
      int status = 0;
      waitpid(child, &status, 0);
      if (status != 0) Die("a rank that left in order ended with status " + std::to_string(status));
    }
    for (auto& [read_end, write_end] : orders_) {
      close(read_end);
      close(write_end);
    }
  }

  /*! \brief Order a round. */
  uint64_t Begin(int action, uint64_t seed) {
    Order order;
    order.action = action;
    order.seed = seed;
    order.ticket = ++ticket_;
    Send(order);
    return ticket_;
  }

  /*! \brief Do a round on every rank and return what went wrong, recovered from. */
  std::vector<RankReport> Round(int action, uint64_t seed, double seconds = 120) {
    Begin(action, seed);
    const WorkerTable::Progress progress = server_->worker_table().WaitDone(ticket_, seconds);
    if (progress == WorkerTable::Progress::kDone) return {};
    if (progress == WorkerTable::Progress::kPending) Die("a round hangs");
    const SessionReport report = server_->worker_table().Report();
    if (!report.dead.empty()) Die("a rank died");
    server_->worker_table().Recover();
    return report.errors;
  }

  void Kill(int rank) { kill(children_[rank], SIGKILL); }

  /*! \brief End the processes of a session that lost one. */
  void GiveUp() {
    given_up_ = true;
    server_.reset();
    for (pid_t child : children_) {
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
    for (auto& [read_end, write_end] : orders_) {
      close(read_end);
      close(write_end);
    }
  }

  SessionServer& server() { return *server_; }
  pid_t pid(int rank) const { return children_[rank]; }

 private:
  void Send(const Order& order) {
    for (auto& pipe_ends : orders_) Write(pipe_ends.second, &order, sizeof(order));
  }

  static void Write(int file, const void* data, size_t bytes) {
    if (write(file, data, bytes) != static_cast<ssize_t>(bytes)) Die("write to a pipe");
  }

  static void Read(int file, void* data, size_t bytes) {
    if (read(file, data, bytes) != static_cast<ssize_t>(bytes)) Die("read from a pipe");
  }

  /*! \brief The worker's side; what worker::Guard and worker::Done are to Disco. */
  void Serve(int id) {
    const int orders = orders_[id].first;
    size_t size = 0;
    Read(orders, &size, sizeof(size));
    std::string invitation(size, '\0');
    Read(orders, invitation.data(), size);
    // On backends for devices each has one of its own.
    SetCurrentRank(
        Join(Invitation::Unpack(invitation), *backend_, id, num_ranks_, num_groups_, id));
    Rank* rank = CurrentRank();
    backend_->UseInstructionSet(rank->options().instruction_set);
    while (true) {
      Order order;
      Read(orders, &order, sizeof(order));
      if (order.last) return SetCurrentRank(nullptr);
      bool failed = false;
      auto guard = [&](auto&& function) {
        try {
          function();
        } catch (const Error& error) {
          if (std::exchange(failed, true)) return;  // what follows from it
          rank->connection().Send(FrameType::kError, PackError(error.kind(), error.what(), ""));
          rank->FailSession();
        }
      };
      guard([&] {
        rank->endpoint().Follow(rank->control().generation.load());
        body_(*rank, order);
      });
      guard([&] { rank->endpoint().Settle(); });
      rank->connection().Send(FrameType::kDone, AsBytes(order.ticket));
    }
  }

  const Backend* backend_ = nullptr;
  int num_ranks_;
  int num_groups_;
  Body body_;
  std::unique_ptr<SessionServer> server_;
  std::vector<std::pair<int, int>> orders_;
  std::vector<std::thread> threads_;
  std::vector<pid_t> children_;
  uint64_t ticket_ = 0;
  bool given_up_ = false;
};

/*! \brief Do a round that ends in errors of the kind alone, and what follows from them; in none
 *         where it is empty.
 */
inline void Expect(Ranks& ranks, int action, uint64_t seed, const std::string& expected) {
  bool found = expected.empty();
  for (const RankReport& report : ranks.Round(action, seed, 600)) {
    found = found || report.kind == expected;
    if (report.kind == expected || (report.kind == kind::kPeer && !expected.empty())) continue;
    Die(Text("action ", action, " with seed ", seed, ": rank ", report.rank, ": ", report.kind,
             ": ", report.message));
  }
  if (!found) Die(Text("action ", action, " with seed ", seed, " ended without its error"));
}

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_RANKS_H_
