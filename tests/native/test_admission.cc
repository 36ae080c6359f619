/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_admission.cc
 * \brief How a session starts, and what becomes of those who may not join: strangers, impostors,
 *        crowds, and copies of ranks in forked processes.
 */
#include <dirent.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

#include "client.h"
#include "expect.h"
#include "ranks.h"

namespace tvm_ipc {
namespace {

using Clock = std::chrono::steady_clock;

void TestRefusals() {
  SessionServer server(Options(2));
  auto refused = [&](Hello hello, const std::string& why) {
    Client client(server);
    const Frame answer = client.Introduce(hello);
    EXPECT(answer.type == FrameType::kRefusal);
    EXPECT(Contains(answer.payload, why), answer.payload);
  };
  Client first(server);
  Hello impostor = first.hello(0, 2);
  impostor.token[3] ^= 1;
  refused(impostor, "token");
  Hello stray = first.hello(0, 2);
  stray.backend[0] = 'x';
  refused(stray, "rank 0 was started for the backend xhm, the session has shm");
  refused(first.hello(2, 2), "no rank 2");
  refused(first.hello(-1, 2), "no rank -1");
  refused(first.hello(0, 3), "3 workers");
  refused(first.hello(0, 2, 0), "0 groups");
  {
    Client silent(server);
    Client rude(server);
    rude.Write(std::string(200, 'x'));
    Client brief(server);
    brief.Write("hi");
  }
  EXPECT(first.Join(0, 2));
  refused(first.hello(0, 2), "already joined");
  refused(first.hello(1, 2, 2), "2 groups");
  Client second(server);
  EXPECT(second.Join(1, 2));
  first.Write(Client::Framed(FrameType::kJoined, ""));
  EXPECT(!server.worker_table().WaitJoined(0), "one of two has mapped the memory");
  second.Write(Client::Framed(FrameType::kJoined, ""));
  const auto end = Clock::now() + std::chrono::seconds(30);
  while (!server.worker_table().WaitJoined(0.1)) EXPECT(Clock::now() < end);
}

/*!
 * \brief Any program of the user may connect: one that says nothing, half a greeting, or nonsense,
 *        many that come and go, and more than fit. No rank waits for them, and none is refused.
 */
void TestPendingPeers() {
  SessionServer server(Options(3));
  const Invitation invitation = Invitation::Unpack(server.invitation());
  std::vector<std::unique_ptr<Client>> pending_peers;
  for (int i = 0; i < 3 * kMaxRanks; ++i) pending_peers.push_back(std::make_unique<Client>(server));
  for (const char* words : {"x", "GET / HTTP/1.1\r\n\r\n"}) {
    pending_peers.push_back(std::make_unique<Client>(server));
    pending_peers.back()->Write(words);
  }
  pending_peers.push_back(std::make_unique<Client>(server));
  pending_peers.back()->Write(Client::Framed(FrameType::kBye, std::string(1000, 'y')));
  pending_peers.push_back(std::make_unique<Client>(server));
  Hello impostor = pending_peers.back()->hello(0, 3);
  impostor.token[0] ^= 1;
  EXPECT(pending_peers.back()->Introduce(impostor).type == FrameType::kRefusal);

  std::atomic<bool> enough{false};
  std::vector<std::thread> crowd;
  for (int i = 0; i < 2; ++i) {
    crowd.emplace_back([&] {
      while (!enough) Caller one(invitation);
    });
  }
  usleep(20000);
  const auto before = Clock::now();
  std::vector<std::thread> ranks;
  std::atomic<int> leave{0};
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      SetCurrentRank(Join(invitation, FindBackend("shm"), rank, 3, 1));
      while (leave == 0) usleep(1000);
      SetCurrentRank(nullptr);
    });
  }
  while (!server.worker_table().WaitJoined(1))
    EXPECT(Clock::now() - before < std::chrono::seconds(30));
  EXPECT(server.worker_table().Report().refusals.empty());
  enough = true;
  for (std::thread& thread : crowd) thread.join();
  leave = 1;
  for (std::thread& thread : ranks) thread.join();
}

/*! \brief What a worker of the session was refused for ends the wait for it. */
void TestRefusalEndsTheWait() {
  SessionServer server(Options(2));
  Client client(server);
  EXPECT(!client.Join(0, 3));
  const auto before = Clock::now();
  EXPECT(!server.worker_table().WaitJoined(30));
  EXPECT(Clock::now() - before < std::chrono::seconds(10));
  EXPECT(server.worker_table().Report().refusals.size() == 1);
}

/*! \brief A child has its parent's memory, and none of its parent's connections. */
void TestForkedChild() {
  SessionServer server(Options(2));
  const Invitation invitation = Invitation::Unpack(server.invitation());
  Client other(server);
  EXPECT(other.Join(1, 2));
  auto rank = Join(invitation, FindBackend("shm"), 0, 2, 1);
  EXPECT(!rank->in_forked_child());
  const pid_t child = fork();
  if (child == 0) {
    const bool alone = rank->in_forked_child() &&
                       !rank->connection().Send(FrameType::kDone, AsBytes(uint64_t{1000}));
    rank.reset();  // says goodbye, to nobody
    _exit(alone ? 0 : 1);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
  EXPECT(rank->connection().Send(FrameType::kDone, AsBytes(uint64_t{7})));
  const auto end = Clock::now() + std::chrono::seconds(30);
  SessionReport report;
  do {
    EXPECT(Clock::now() < end);
    report = server.worker_table().Report();
  } while (report.done[0] == 0);
  EXPECT(report.done[0] == 7 && report.left.empty() && report.dead.empty());
}

/*! \brief One who connects and stalls delays nobody. */
void TestStall() {
  SessionServer server(Options(1));
  Client stalled(server);
  stalled.Write("x");
  const auto before = Clock::now();
  auto rank = Join(Invitation::Unpack(server.invitation()), FindBackend("shm"), 0, 1, 1);
  EXPECT(Clock::now() - before < std::chrono::seconds(10));
  while (!server.worker_table().WaitJoined(1)) {
  }
}

/*! \brief A sum over all ranks. */
void Do(Rank& rank, const Order&) {
  float value = 5;
  const Buffer buffer{&value, 1, ElementType{2, 32, 1}};
  On(rank).AllReduce(buffer, ReduceKind::kSum, kWorld, Strategy::kDefault, 0, buffer);
  EXPECT(value == 5 * static_cast<float>(rank.num_ranks()));
}

int Entries(const char* directory) {
  int count = 0;
  DIR* dir = opendir(directory);
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

int Mappings() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  int count = 0;
  while (std::getline(maps, line)) count += Contains(line, "memfd:tvm_ipc");
  return count;
}

/*! \brief Sessions one after the other, ended in order or not, leave nothing. */
void TestManySessions() {
  const int files = Entries("/proc/self/fd");
  const int threads = Entries("/proc/self/task");
  for (int i = 0; i < 150; ++i) {
    const int n = 1 + i % 4;
    if (i % 3 == 2) {
      SessionServer server(Options(n));  // some never come
      Client client(server);
      if (n > 1) EXPECT(client.Join(0, n));
      continue;
    }
    const auto kind = i % 10 == 0 ? Ranks::Kind::kProcesses : Ranks::Kind::kThreads;
    Ranks ranks(kind, Options(n), 1, Do);
    EXPECT_NO_ERROR(ranks.Round(0, 0));
  }
  EXPECT(Entries("/proc/self/fd") == files, "open files: ", Entries("/proc/self/fd"));
  EXPECT(Entries("/proc/self/task") == threads);
  EXPECT(Mappings() == 0, "mappings: ", Mappings());
}

}  // namespace
}  // namespace tvm_ipc

int main() {
  using namespace tvm_ipc;
  TestRefusals();
  TestStall();
  TestPendingPeers();
  TestRefusalEndsTheWait();
  TestForkedChild();
  TestManySessions();
  std::printf("passed\n");
  return 0;
}
