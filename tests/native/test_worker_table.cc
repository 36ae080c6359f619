/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_worker_table.cc
 * \brief What the hub hears of those who joined: reports, values, goodbyes; and ranks that die,
 * come late, or leave with a report on their lips.
 */
#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <string>
#include <vector>

#include "client.h"
#include "core/atfork_descriptors.h"
#include "expect.h"
#include "ranks.h"

namespace tvm_ipc {
namespace {

using Clock = std::chrono::steady_clock;

/*! \brief By its count of forks a process knows that what it has was its parent's. */
void TestGeneration() {
  const uint32_t before = Generation();
  const pid_t child = fork();
  if (child == 0) std::_Exit(Generation() == before ? 1 : 0);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT(status == 0 && Generation() == before);
}

/*! \brief What a rank says right before it leaves is heard, and leaving is not dying. */
void TestLastWords() {
  for (int i = 0; i < 200; ++i) {
    SessionServer server(Options(1));
    Client client(server);
    EXPECT(client.Join(0, 1));
    client.Write(Client::Framed(FrameType::kError, PackError("ValueError", "the last word", "")) +
                 Client::Framed(FrameType::kDone, AsBytes(uint64_t{7})) +
                 Client::Framed(FrameType::kBye, ""));
    client.Leave();
    EXPECT(server.worker_table().WaitLeft(30));
    const SessionReport report = server.worker_table().Report();
    EXPECT(report.dead.empty(), "a goodbye was taken for a death, session ", i);
    EXPECT(report.errors.size() == 1 && report.errors[0].message == "the last word");
    EXPECT(report.done[0] == 7);
  }
}

/*! \brief The end of a connection without a goodbye is a death; what came before it counts. */
void TestDeathOfAConnection() {
  SessionServer server(Options(2));
  Client one(server), two(server);
  EXPECT(one.Join(0, 2) && two.Join(1, 2));
  two.Write(Client::Framed(FrameType::kDone, AsBytes(uint64_t{3})) +
            Client::Framed(FrameType::kValue, AsBytes(uint64_t{9}) + "abc").substr(0, 20));
  two.Leave();
  EXPECT(server.worker_table().WaitDone(5, 30) == WorkerTable::Progress::kAttention);
  const SessionReport report = server.worker_table().Report();
  EXPECT(report.dead == std::vector<int>{1});
  EXPECT(report.done[1] == 3);
  EXPECT(!server.worker_table().WaitLeft(0.01));
}

/*! \brief Frames of any size arrive whole, however they are cut. */
void TestCutFrames() {
  SessionServer server(Options(1));
  Client client(server);
  EXPECT(client.Join(0, 1));
  std::mt19937_64 random(4);
  std::string value(3 << 20, '\0');
  for (char& byte : value) byte = static_cast<char>(random());
  server.worker_table().ExpectValue(8);
  server.worker_table().ExpectValue(9);
  const std::string stream = Client::Framed(FrameType::kValue, AsBytes(uint64_t{8}) + value) +
                             Client::Framed(FrameType::kValue, AsBytes(uint64_t{9})) +
                             Client::Framed(FrameType::kValue, AsBytes(uint64_t{7}) + "unwanted") +
                             Client::Framed(FrameType::kDone, AsBytes(uint64_t{10}));
  for (size_t at = 0; at < stream.size();) {
    const size_t size = std::min<size_t>(stream.size() - at, 1 + random() % 40000);
    client.Write(stream.substr(at, size));
    at += size;
  }
  EXPECT(server.worker_table().WaitDone(10, 30) == WorkerTable::Progress::kDone);
  EXPECT(server.worker_table().TakeValue(8) == value);
  EXPECT(server.worker_table().TakeValue(8).empty() && server.worker_table().TakeValue(9).empty() &&
         server.worker_table().TakeValue(7).empty());
}

enum Action { kLoop, kWaitForRank1, kReceiveFromRank1, kOnce };

void Sum(Rank& rank, float value) {
  const size_t count = 1 + static_cast<size_t>(value) % 2 * 50000;
  std::vector<float> data(count, value);
  const Buffer buffer{data.data(), count, ElementType{2, 32, 1}};
  On(rank).AllReduce(buffer, ReduceKind::kSum, kWorld, Strategy::kDefault, 0, buffer);
  EXPECT(data.back() == value * static_cast<float>(rank.num_ranks()));
}

void Do(Rank& rank, const Order& order) {
  auto rest = [&] {  // until the others have given up
    while (rank.control().abort.load() == 0) usleep(1000);
  };
  switch (order.action) {
    case kLoop:
      for (int i = 0;; ++i) Sum(rank, static_cast<float>(i % 7));
    case kWaitForRank1:
      if (rank.id() == 1) rest();
      return Sum(rank, 1);
    case kReceiveFromRank1: {
      if (rank.id() == 1) rest();
      uint8_t byte = 0;
      const Buffer buffer{&byte, 1, ElementType{1, 8, 1}};
      if (rank.id() != 1) rank.endpoint().Receive(buffer, 1);
      return;
    }
    default:
      Sum(rank, 5);
  }
}

/*! \brief Who waits for a rank that does not come is told whom, and the session goes on. */
void TestLateRank() {
  Ranks ranks(Ranks::Kind::kThreads, Options(3, kShortTimeout), 1, Do);
  for (int action : {kWaitForRank1, kReceiveFromRank1, kWaitForRank1}) {
    const auto before = Clock::now();
    const std::vector<RankReport> reports = ranks.Round(action, 0);
    const auto spent = Clock::now() - before;
    EXPECT(spent > std::chrono::duration<double>(kShortTimeout - 0.1) &&
           spent < std::chrono::seconds(20));
    int deadlines = 0;
    for (const RankReport& report : reports) {
      if (report.kind == kind::kPeer) continue;
      EXPECT(report.kind == std::string(kind::kDeadline), report.kind, ": ", report.message);
      EXPECT(Contains(report.message, "rank 1 (pid "), report.message);
      EXPECT(!Contains(report.message, "rank 2 (pid "), report.message);
      EXPECT(report.rank != 1);
      ++deadlines;
    }
    EXPECT(deadlines > 0);
    for (int i = 0; i < 5; ++i) EXPECT_NO_ERROR(ranks.Round(kOnce, 0));
  }
}

/*! \brief Killed at any moment, a rank is missed within 2 s, by the hub and by its peers. */
void TestKilledRank(int rounds) {
  std::mt19937_64 random(12);
  double slowest = 0;
  for (int i = 0; i < rounds; ++i) {
    Ranks ranks(Ranks::Kind::kProcesses, Options(3), 1, Do);
    const uint64_t ticket = ranks.Begin(kLoop, 0);
    usleep(static_cast<useconds_t>(random() % 20000));
    const int victim = static_cast<int>(random() % 3);
    const auto before = Clock::now();
    ranks.Kill(victim);
    EXPECT(ranks.server().worker_table().WaitDone(ticket, 30) == WorkerTable::Progress::kAttention);
    SessionReport report = ranks.server().worker_table().Report();
    EXPECT(report.dead == std::vector<int>{victim});
    while (report.errors.size() < 2) {
      EXPECT(Clock::now() - before < std::chrono::seconds(30), "peers go on waiting");
      usleep(1000);
      report = ranks.server().worker_table().Report();
    }
    const std::chrono::duration<double> spent = Clock::now() - before;
    slowest = std::max(slowest, spent.count());
    const std::string name = Text("rank ", victim, " (pid ", ranks.pid(victim), ") died");
    for (const RankReport& error : report.errors) {
      EXPECT(error.kind == std::string(kind::kPeer) && Contains(error.message, name), error.kind,
             ": ", error.message);
    }
    ranks.GiveUp();
  }
  std::printf("%d ranks killed; the last peer knew after %.3f s at most\n", rounds, slowest);
  EXPECT(slowest < 2, "a death was noticed after ", slowest, " s");
}

/*!
 * \brief Without its controller a rank ends, though a process that the controller forked keeps
 *        every socket of it open.
 */
void TestKilledController() {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  for (int i = 0; i < 5; ++i) {
    int ends[2];
    EXPECT(pipe(ends) == 0);
    std::fflush(stdout);
    const pid_t controller = fork();
    if (controller == 0) {
      Ranks ranks(Ranks::Kind::kProcesses, Options(3), 1, Do);
      ranks.Begin(kLoop, 0);
      const pid_t bystander = fork();
      if (bystander == 0) {
        while (true) pause();
      }
      const pid_t pids[] = {bystander, ranks.pid(0), ranks.pid(1), ranks.pid(2)};
      EXPECT(write(ends[1], pids, sizeof(pids)) == sizeof(pids));
      while (true) pause();
    }
    pid_t pids[4];
    EXPECT(read(ends[0], pids, sizeof(pids)) == sizeof(pids));
    usleep(5000);
    kill(controller, SIGKILL);
    waitpid(controller, nullptr, 0);
    const auto end = Clock::now() + std::chrono::seconds(2);
    int left_behind = 0;
    for (pid_t rank : {pids[1], pids[2], pids[3]}) {
      while (waitpid(rank, nullptr, WNOHANG) == 0) {
        usleep(1000);
        if (Clock::now() < end) continue;
        ++left_behind;
        kill(rank, SIGKILL);
        waitpid(rank, nullptr, 0);
        break;
      }
    }
    kill(pids[0], SIGKILL);
    waitpid(pids[0], nullptr, 0);
    EXPECT(left_behind == 0, left_behind, " ranks outlive their controller");
    close(ends[0]);
    close(ends[1]);
  }
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  using namespace tvm_ipc;
  TestGeneration();
  TestLastWords();
  TestDeathOfAConnection();
  TestCutFrames();
  TestLateRank();
  TestKilledController();
  TestKilledRank(argc > 1 ? std::stoi(argv[1]) : 20);
  std::printf("passed\n");
  return 0;
}
