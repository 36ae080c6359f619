/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_hub.cc
 * \brief How a session starts and ends, and what the hub makes of those who do not behave:
 *        strangers, impostors, ranks that die, come late, or leave with a report on their lips.
 */
#include <dirent.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <random>
#include <utility>

#include "expect.h"
#include "ranks.h"

namespace tvm_ipc {
namespace {

using Clock = std::chrono::steady_clock;

HubOptions Options(int num_ranks, double timeout_seconds = 60) {
  HubOptions options;
  options.num_ranks = num_ranks;
  options.timeout_seconds = timeout_seconds;
  options.arena_bytes = 4 << 20;
  return options;
}

/*! \brief Connects, while the hub lets anybody, and says nothing. */
class Connection {
 public:
  explicit Connection(const Invitation& invitation) {
    socket_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path + 1, invitation.socket_name.data(), invitation.socket_name.size());
    const auto length =
        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + invitation.socket_name.size());
    connected_ = connect(socket_, reinterpret_cast<sockaddr*>(&address), length) == 0;
  }
  ~Connection() {
    if (socket_ >= 0) close(socket_);
  }

  bool connected_ = false;
  int socket_ = -1;
};

/*! \brief Something that speaks to the hub without being a rank. */
class Client {
 public:
  explicit Client(const Hub& hub) : invitation_(Invitation::Unpack(hub.invitation())) {
    Connection connection(invitation_);
    EXPECT(connection.connected_);
    socket_ = std::exchange(connection.socket_, -1);
  }
  ~Client() { Leave(); }

  void Leave() {
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
  }

  void Write(const std::string& bytes) {
    EXPECT(send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size()));
  }

  static std::string Frame(uint32_t type, const std::string& payload) {
    const frame::Header header{type, 0, payload.size()};
    return std::string(reinterpret_cast<const char*>(&header), sizeof(header)) + payload;
  }

  static std::string Number(uint64_t value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  Hello hello(int rank, int num_ranks, int num_groups = 1) const {
    Hello hello{};
    memcpy(hello.token, invitation_.token.data(), sizeof(hello.token));
    hello.rank = rank;
    hello.num_ranks = num_ranks;
    hello.num_groups = num_groups;
    hello.pid = getpid();
    return hello;
  }

  /*! \brief Say hello; the answer's files are closed here. */
  Welcome Introduce(const Hello& hello) {
    Write(Frame(frame::kHello, std::string(reinterpret_cast<const char*>(&hello), sizeof(hello))));
    Welcome welcome{};
    iovec data{&welcome, sizeof(welcome)};
    alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int) * (kMaxRanks + 1))];
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = space;
    message.msg_controllen = sizeof(space);
    EXPECT(recvmsg(socket_, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL) == sizeof(welcome));
    for (cmsghdr* part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(&message, part)) {
      const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      EXPECT(welcome.accepted && count == static_cast<size_t>(welcome.num_files));
      for (size_t i = 0; i < count; ++i) {
        int file;
        memcpy(&file, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
        close(file);
      }
    }
    return welcome;
  }

 private:
  Invitation invitation_;
  int socket_ = -1;
};

void TestRefusals() {
  Hub hub(Options(2));
  auto refused = [&](Hello hello, const std::string& why) {
    Client client(hub);
    const Welcome welcome = client.Introduce(hello);
    EXPECT(!welcome.accepted);
    EXPECT(Contains(welcome.reason, why), welcome.reason);
  };
  Client first(hub);
  Hello impostor = first.hello(0, 2);
  impostor.token[3] ^= 1;
  refused(impostor, "token");
  refused(first.hello(2, 2), "no rank 2");
  refused(first.hello(-1, 2), "no rank -1");
  refused(first.hello(0, 3), "3 workers");
  refused(first.hello(0, 2, 0), "0 groups");
  {
    Client silent(hub);
    Client rude(hub);
    rude.Write(std::string(200, 'x'));
    Client brief(hub);
    brief.Write("hi");
  }
  EXPECT(first.Introduce(first.hello(0, 2)).accepted);
  refused(first.hello(0, 2), "joined already");
  refused(first.hello(1, 2, 2), "2 groups");
  Client second(hub);
  EXPECT(second.Introduce(second.hello(1, 2)).accepted);
  first.Write(Client::Frame(frame::kJoined, ""));
  EXPECT(!hub.WaitJoined(0), "one of two has mapped the memory");
  second.Write(Client::Frame(frame::kJoined, ""));
  const auto end = Clock::now() + std::chrono::seconds(30);
  while (!hub.WaitJoined(0.1)) EXPECT(Clock::now() < end);
}

/*!
 * \brief Any program of the user may connect: one that says nothing, half a greeting, or nonsense,
 *        many that come and go, and more than fit. No rank waits for them, and none is refused.
 */
void TestStrangers() {
  Hub hub(Options(3));
  const Invitation invitation = Invitation::Unpack(hub.invitation());
  std::vector<std::unique_ptr<Client>> strangers;
  for (int i = 0; i < 3 * kMaxRanks; ++i) strangers.push_back(std::make_unique<Client>(hub));
  for (const char* words : {"x", "GET / HTTP/1.1\r\n\r\n"}) {
    strangers.push_back(std::make_unique<Client>(hub));
    strangers.back()->Write(words);
  }
  strangers.push_back(std::make_unique<Client>(hub));
  strangers.back()->Write(Client::Frame(frame::kBye, std::string(1000, 'y')));
  strangers.push_back(std::make_unique<Client>(hub));
  Hello impostor = strangers.back()->hello(0, 3);
  impostor.token[0] ^= 1;
  EXPECT(!strangers.back()->Introduce(impostor).accepted);

  std::atomic<bool> enough{false};
  std::vector<std::thread> crowd;
  for (int i = 0; i < 2; ++i) {
    crowd.emplace_back([&] {
      while (!enough) Connection one(invitation);
    });
  }
  usleep(20000);
  const auto before = Clock::now();
  std::vector<std::thread> ranks;
  std::atomic<int> leave{0};
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      SetCurrentRank(Join(invitation, rank, 3, 1));
      while (leave == 0) usleep(1000);
      SetCurrentRank(nullptr);
    });
  }
  while (!hub.WaitJoined(1)) EXPECT(Clock::now() - before < std::chrono::seconds(30));
  EXPECT(hub.Report().refusals.empty());
  enough = true;
  for (std::thread& thread : crowd) thread.join();
  leave = 1;
  for (std::thread& thread : ranks) thread.join();
}

/*! \brief What a worker of the session was refused for ends the wait for it. */
void TestRefusalEndsTheWait() {
  Hub hub(Options(2));
  Client client(hub);
  EXPECT(!client.Introduce(client.hello(0, 3)).accepted);
  const auto before = Clock::now();
  EXPECT(!hub.WaitJoined(30));
  EXPECT(Clock::now() - before < std::chrono::seconds(10));
  EXPECT(hub.Report().refusals.size() == 1);
}

/*! \brief A child has its parent's memory, and none of its parent's connections. */
void TestForkedChild() {
  Hub hub(Options(2));
  const Invitation invitation = Invitation::Unpack(hub.invitation());
  Client other(hub);
  EXPECT(other.Introduce(other.hello(1, 2)).accepted);
  auto rank = Join(invitation, 0, 2, 1);
  EXPECT(!rank->forked());
  const pid_t child = fork();
  if (child == 0) {
    const bool alone = rank->forked() && !rank->SendFrame(frame::kDone, Client::Number(1000));
    rank.reset();  // says goodbye, to nobody
    _exit(alone ? 0 : 1);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
  EXPECT(rank->SendFrame(frame::kDone, Client::Number(7)));
  const auto end = Clock::now() + std::chrono::seconds(30);
  HubReport report;
  do {
    EXPECT(Clock::now() < end);
    report = hub.Report();
  } while (report.done[0] == 0);
  EXPECT(report.done[0] == 7 && report.left.empty() && report.dead.empty());
}

/*! \brief One who connects and stalls delays nobody. */
void TestStall() {
  Hub hub(Options(1));
  Client stalled(hub);
  stalled.Write("x");
  const auto before = Clock::now();
  auto rank = Join(Invitation::Unpack(hub.invitation()), 0, 1, 1);
  EXPECT(Clock::now() - before < std::chrono::seconds(10));
  while (!hub.WaitJoined(1)) {
  }
}

/*! \brief What a rank says right before it leaves is heard, and leaving is not dying. */
void TestLastWords() {
  for (int i = 0; i < 200; ++i) {
    Hub hub(Options(1));
    Client client(hub);
    EXPECT(client.Introduce(client.hello(0, 1)).accepted);
    client.Write(Client::Frame(frame::kError, PackError("ValueError", "the last word", "")) +
                 Client::Frame(frame::kDone, Client::Number(7)) + Client::Frame(frame::kBye, ""));
    client.Leave();
    EXPECT(hub.WaitLeft(30));
    const HubReport report = hub.Report();
    EXPECT(report.dead.empty(), "a goodbye was taken for a death, session ", i);
    EXPECT(report.errors.size() == 1 && report.errors[0].message == "the last word");
    EXPECT(report.done[0] == 7);
  }
}

/*! \brief The end of a connection without a goodbye is a death; what came before it counts. */
void TestDeathOfAConnection() {
  Hub hub(Options(2));
  Client one(hub), two(hub);
  EXPECT(one.Introduce(one.hello(0, 2)).accepted && two.Introduce(two.hello(1, 2)).accepted);
  two.Write(Client::Frame(frame::kDone, Client::Number(3)) +
            Client::Frame(frame::kValue, Client::Number(9) + "abc").substr(0, 20));
  two.Leave();
  EXPECT(hub.WaitDone(5, 30) == Hub::Progress::kAttention);
  const HubReport report = hub.Report();
  EXPECT(report.dead == std::vector<int>{1});
  EXPECT(report.done[1] == 3);
  EXPECT(!hub.WaitLeft(0.01));
}

/*! \brief Frames of any size arrive whole, however they are cut. */
void TestCutFrames() {
  Hub hub(Options(1));
  Client client(hub);
  EXPECT(client.Introduce(client.hello(0, 1)).accepted);
  std::mt19937_64 random(4);
  std::string value(3 << 20, '\0');
  for (char& byte : value) byte = static_cast<char>(random());
  hub.WantValue(8);
  hub.WantValue(9);
  const std::string stream = Client::Frame(frame::kValue, Client::Number(8) + value) +
                             Client::Frame(frame::kValue, Client::Number(9)) +
                             Client::Frame(frame::kValue, Client::Number(7) + "unwanted") +
                             Client::Frame(frame::kDone, Client::Number(10));
  for (size_t at = 0; at < stream.size();) {
    const size_t size = std::min<size_t>(stream.size() - at, 1 + random() % 40000);
    client.Write(stream.substr(at, size));
    at += size;
  }
  EXPECT(hub.WaitDone(10, 30) == Hub::Progress::kDone);
  EXPECT(hub.TakeValue(8) == value);
  EXPECT(hub.TakeValue(8).empty() && hub.TakeValue(9).empty() && hub.TakeValue(7).empty());
}

enum Action { kLoop, kWaitForRank1, kReceiveFromRank1, kOnce };

void Sum(Rank& rank, float value) {
  const size_t count = 1 + static_cast<size_t>(value) % 2 * 50000;
  std::vector<float> data(count, value);
  const Buffer buffer{data.data(), count, ElementType{2, 32, 1}};
  AllReduce(rank, false, buffer, buffer, ReduceKind::kSum);
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
      if (rank.id() != 1) Receive(rank, buffer, 1);
      return;
    }
    default:
      Sum(rank, 5);
  }
}

/*! \brief Who waits for a rank that does not come is told whom, and the session goes on. */
void TestLateRank() {
  Ranks ranks(Ranks::Kind::kThreads, Options(3, 1.0), 1, Do);
  for (int action : {kWaitForRank1, kReceiveFromRank1, kWaitForRank1}) {
    const auto before = Clock::now();
    const std::vector<RankReport> reports = ranks.Round(action, 0);
    const auto spent = Clock::now() - before;
    EXPECT(spent > std::chrono::milliseconds(900) && spent < std::chrono::seconds(20));
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
    for (int i = 0; i < 5; ++i) EXPECT(ranks.Round(kOnce, 0).empty());
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
    EXPECT(ranks.hub().WaitDone(ticket, 30) == Hub::Progress::kAttention);
    HubReport report = ranks.hub().Report();
    EXPECT(report.dead == std::vector<int>{victim});
    while (report.errors.size() < 2) {
      EXPECT(Clock::now() - before < std::chrono::seconds(30), "peers go on waiting");
      usleep(1000);
      report = ranks.hub().Report();
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
      Hub hub(Options(n));  // some never come
      Client client(hub);
      if (n > 1) EXPECT(client.Introduce(client.hello(0, n)).accepted);
      continue;
    }
    const auto kind = i % 10 == 0 ? Ranks::Kind::kProcesses : Ranks::Kind::kThreads;
    Ranks ranks(kind, Options(n), 1, Do);
    EXPECT(ranks.Round(kOnce, 0).empty());
  }
  EXPECT(Entries("/proc/self/fd") == files, "open files: ", Entries("/proc/self/fd"));
  EXPECT(Entries("/proc/self/task") == threads);
  EXPECT(Mappings() == 0, "mappings: ", Mappings());
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  using namespace tvm_ipc;
  TestRefusals();
  TestStall();
  TestStrangers();
  TestRefusalEndsTheWait();
  TestForkedChild();
  TestLastWords();
  TestDeathOfAConnection();
  TestCutFrames();
  TestLateRank();
  TestManySessions();
  TestKilledController();
  TestKilledRank(argc > 1 ? std::stoi(argv[1]) : 20);
  std::printf("passed\n");
  return 0;
}
