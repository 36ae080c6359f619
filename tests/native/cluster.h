/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file cluster.h
 * \brief A session of several nodes in one process: a hub for the controller and one for each node,
 *        wires between them that can be cut or held, and ranks that are threads.
 */
#ifndef TVM_IPC_TESTS_CLUSTER_H_
#define TVM_IPC_TESTS_CLUSTER_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client.h"
#include "core/rank_runtime_state.h"
#include "core/session_server.h"
#include "core/worker_handshake.h"
#include "ranks.h"

namespace tvm_ipc {

/*! \brief Two ends of a connection over the loopback interface. */
inline std::pair<File, File> TcpPair() {
  File listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* where = reinterpret_cast<sockaddr*>(&address);
  EXPECT(bind(listener.get(), where, size) == 0 && listen(listener.get(), 1) == 0);
  EXPECT(getsockname(listener.get(), where, &size) == 0);
  File one(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT(connect(one.get(), where, size) == 0);
  return {std::move(one), File(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC))};
}

/*! \brief Two ends of a connection inside of the machine, which is there sooner. */
inline std::pair<File, File> UnixPair() {
  int ends[2];
  EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {File(ends[0]), File(ends[1])};
}

/*! \brief Carries bytes between two connections until it is told to hold them back. */
class RingFixture {
 public:
  RingFixture() {
    auto [left, left_here] = UnixPair();
    auto [right, right_here] = UnixPair();
    ends_ = {std::move(left), std::move(right)};
    here_[0] = std::move(left_here);
    here_[1] = std::move(right_here);
    thread_ = std::thread([this] { Carry(); });
  }
  ~RingFixture() {
    Cut();
    thread_.join();
  }
  /*! \brief The connections' other ends. */
  std::pair<File, File> ends_;
  /*! \brief From now on nothing arrives, and nobody is told. */
  void Hold() { held_ = true; }
  /*! \brief Both connections end. */
  void Cut() {
    for (File& end : here_) shutdown(end.get(), SHUT_RDWR);
    cut_ = true;
  }

 private:
  void Carry() {
    char bytes[16 << 10];
    while (!cut_) {
      pollfd polled[2] = {{here_[0].get(), POLLIN, 0}, {here_[1].get(), POLLIN, 0}};
      if (held_) {
        usleep(1000);
        continue;
      }
      if (poll(polled, 2, 20) <= 0) continue;
      for (int from : {0, 1}) {
        if (polled[from].revents == 0 || held_) continue;
        const ssize_t got = recv(here_[from].get(), bytes, sizeof(bytes), 0);
        if (got <= 0) return Cut();
        for (ssize_t at = 0; at < got;) {
          const ssize_t some =
              send(here_[1 - from].get(), bytes + at, static_cast<size_t>(got - at), MSG_NOSIGNAL);
          if (some <= 0) return Cut();
          at += some;
        }
      }
    }
  }

  File here_[2];
  std::atomic<bool> held_{false}, cut_{false};
  std::thread thread_;
};

/*! \brief What the nodes of a cluster have in common. */
struct ClusterSettings {
  LinkTimes times;
  double timeout_seconds = 60;
  const char* backend = "shm";
  bool flat = false;
  /*! \brief 0: as small as that of other tests. */
  size_t arena_bytes = 0;
};

/*! \brief The options of the hub on a node, or of the controller's (-1). */
inline SessionServerOptions NodeOptions(const std::vector<int>& sizes, int node,
                                        const ClusterSettings& settings) {
  int n = 0;
  SessionServerOptions options = Options(1, settings.timeout_seconds);
  options.backend = &FindBackend(settings.backend);
  options.flat = settings.flat;
  if (settings.arena_bytes != 0) options.arena_bytes = settings.arena_bytes;
  for (int size : sizes) {
    options.nodes.push_back({std::string(1, static_cast<char>('a' + options.nodes.size())), size});
    n += size;
  }
  options.num_ranks = n;
  options.node = node;
  options.link_times = settings.times;
  return options;
}

/*!
 * \brief Where all nodes have as many ranks each is a group, so that a group's collectives stay
 * inside of a node.
 */
class Cluster {
 public:
  using Body = std::function<void(Rank&, const Order&)>;

  Cluster(const std::vector<int>& sizes, Body body, const ClusterSettings& settings = {})
      : body_(std::move(body)),
        backend_(FindBackend(settings.backend)),
        controller_(NodeOptions(sizes, -1, settings)) {
    int rank = 0;
    for (size_t node = 0; node < sizes.size(); ++node) {
      const int number = static_cast<int>(node);
      nodes_.push_back(std::make_unique<SessionServer>(NodeOptions(sizes, number, settings)));
      rings_.push_back(std::make_unique<RingFixture>());
      controller_.Attach(number, std::move(rings_[node]->ends_.first));
      nodes_[node]->Attach(-1, std::move(rings_[node]->ends_.second));
      for (int i = 0; i < sizes[node]; ++i, ++rank) {
        const std::string invitation = nodes_[node]->invitation();
        const int n = Total(sizes);
        const int nodes = static_cast<int>(sizes.size());
        const int groups = n % nodes == 0 ? nodes : 1;
        threads_.emplace_back(
            [this, invitation, rank, n, groups] { Serve(invitation, rank, n, groups); });
      }
    }
    if (!controller_.worker_table().WaitJoined(60)) Die("the ranks did not join");
  }
  ~Cluster() {
    Order order;
    order.last = 1;
    Give(order);
    for (std::thread& thread : threads_) thread.join();
    if (!controller_.worker_table().WaitLeft(60)) Die("the ranks did not leave");
  }

  uint64_t Begin(int action, uint64_t seed) {
    Order order;
    order.action = action;
    order.seed = seed;
    order.ticket = ++ticket_;
    Give(order);
    return ticket_;
  }

  /*! \brief Do a round on every rank and return what went wrong, recovered from. */
  std::vector<RankReport> Round(int action, uint64_t seed) {
    Begin(action, seed);
    const WorkerTable::Progress progress = controller_.worker_table().WaitDone(ticket_, 120);
    if (progress == WorkerTable::Progress::kDone) return {};
    if (progress == WorkerTable::Progress::kPending) Die("a round hangs");
    const SessionReport report = controller_.worker_table().Report();
    if (!report.lost.empty()) Die(report.lost[0]);
    if (!report.dead.empty()) Die("a rank died");
    controller_.worker_table().Recover();
    return report.errors;
  }

  /*! \brief The memory of each node, for an engine. */
  std::vector<std::shared_ptr<Segments>> segments() const {
    std::vector<std::shared_ptr<Segments>> all;
    for (const auto& node : nodes_) all.push_back(node->segments());
    return all;
  }
  WorkerTable& worker_table() { return controller_.worker_table(); }
  SessionServer& controller() { return controller_; }
  SessionServer& node(int number) { return *nodes_[number]; }
  RingFixture& ring(int node) { return *rings_[node]; }
  uint64_t ticket() const { return ticket_; }

 private:
  static int Total(const std::vector<int>& sizes) {
    int n = 0;
    for (int size : sizes) n += size;
    return n;
  }

  void Give(const Order& order) {
    std::lock_guard<std::mutex> lock(mutex_);
    orders_.push_back(order);
    given_.notify_all();
  }

  void Serve(const std::string& invitation, int id, int num_ranks, int num_groups) {
    SetCurrentRank(Join(Invitation::Unpack(invitation), backend_, id, num_ranks, num_groups));
    Rank* rank = CurrentRank();
    for (size_t next = 0;; ++next) {
      Order order;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        given_.wait(lock, [&] { return orders_.size() > next; });
        order = orders_[next];
      }
      if (order.last) return SetCurrentRank(nullptr);
      try {
        body_(*rank, order);
      } catch (const Error& error) {
        rank->connection().Send(FrameType::kError, PackError(error.kind(), error.what(), "where"));
        rank->FailSession();
      }
      rank->connection().Send(FrameType::kDone, AsBytes(order.ticket));
    }
  }

  Body body_;
  const Backend& backend_;
  std::mutex mutex_;
  std::condition_variable given_;
  std::vector<Order> orders_;
  uint64_t ticket_ = 0;
  SessionServer controller_;
  std::vector<std::unique_ptr<SessionServer>> nodes_;
  std::vector<std::unique_ptr<RingFixture>> rings_;
  std::vector<std::thread> threads_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_CLUSTER_H_
