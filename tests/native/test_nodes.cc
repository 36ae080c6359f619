/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_nodes.cc
 * \brief Hubs of several nodes are one session: what happens on one is known on all; a node that
 *        ends, falls silent or talks nonsense is lost, and nobody waits for it.
 *
 * `test_nodes <seconds> [<seed>]` corrupts the messages of a node for so many seconds, and at
 * least five times.
 */
#include <algorithm>
#include <chrono>
#include <random>
#include <string>
#include <vector>

#include "cluster.h"
#include "expect.h"

namespace tvm_ipc {
namespace {

using Type = NodeMessage::Type;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

enum Action { kOnce, kFail, kDie, kLoop, kInternode, kFetch };

void Sum(Rank& rank) {
  float value = 5;
  const Buffer buffer{&value, 1, ElementType{2, 32, 1}};
  On(rank).AllReduce(buffer, ReduceKind::kSum, kGroup, Strategy::kDefault, 0, buffer);
  EXPECT(value == 5 * static_cast<float>(rank.SizeOf(kGroup)));
}

/*! \brief 900,000 letters, in no order that a lost or doubled piece would leave as it is. */
std::string Long(uint64_t seed) {
  std::string block, text;
  for (size_t i = 0; i < 997; ++i) block += static_cast<char>('a' + (seed + i * i) % 23);
  for (int number = 0; text.size() < 900000; ++number) text += block + std::to_string(number);
  text.resize(900000);
  return text;
}

void Do(Rank& rank, const Order& order) {
  float value = 1;
  const Buffer buffer{&value, 1, ElementType{2, 32, 1}};
  const bool chosen = static_cast<uint64_t>(rank.id()) == order.seed % rank.num_ranks();
  switch (order.action) {
    case kOnce:
      return Sum(rank);
    case kFail:
      for (int i = 0; chosen && i < 20; ++i) Sum(rank);
      if (chosen) Fail(kind::kValue, Long(order.seed));
      while (true) Sum(rank);
    case kDie:
      for (int i = 0; chosen && i < 20; ++i) Sum(rank);
      if (chosen) {
        const File copy(rank.connection().Duplicate());
        shutdown(copy.get(), SHUT_RDWR);
      }
      while (true) Sum(rank);
    case kInternode:
      if (rank.id() == 0) {
        const Error refused = ErrorOf([&] { rank.endpoint().Send(buffer, rank.num_ranks() - 1); });
        EXPECT(Contains(refused.what(), "ranks 0 and 3 are on several nodes"), refused.what());
      }
      return On(rank).AllReduce(buffer, ReduceKind::kSum, kWorld, Strategy::kDefault, 0, buffer);
    case kFetch:
      if (chosen) {
        rank.connection().Send(FrameType::kValue, AsBytes(order.seed) + Long(order.seed) +
                                                      Long(order.seed + 1) + Long(order.seed + 2) +
                                                      Long(3) + Long(4) + Long(5));
      }
      return Sum(rank);
    default:
      while (true) Sum(rank);
  }
}

/*! \brief The reports once so many have come. */
SessionReport Reports(WorkerTable& worker_table, size_t count) {
  const auto end = Clock::now() + std::chrono::seconds(60);
  while (true) {
    const SessionReport report = worker_table.Report();
    if (report.errors.size() >= count) return report;
    EXPECT(Clock::now() < end, "only ", report.errors.size(), " of ", count, " errors came");
    usleep(500);
  }
}

/*! \brief All but so many reports are of peers and say this. */
void ExpectPeers(const std::vector<RankReport>& reports, const std::string& text, int others = 0) {
  for (const RankReport& report : reports) {
    if (report.kind == kind::kPeer && Contains(report.message, text)) continue;
    EXPECT(--others >= 0, "rank ", report.rank, ": ", report.kind, ": ", report.message);
  }
}

/*! \brief Errors, long ones too, come home from any node; all ranks stop, and then go on. */
void TestErrorsAndRecovery() {
  Cluster cluster({2, 2}, Do);
  const SessionReport start = cluster.worker_table().Report();
  EXPECT((start.joined == std::vector<int>{0, 1, 2, 3}) && start.pids[3] == getpid());
  for (uint64_t i = 0; i < 4; ++i) {
    EXPECT_NO_ERROR(cluster.Round(kOnce, 0));
    const std::vector<RankReport> reports = cluster.Round(kFail, i);
    const int rank = static_cast<int>(i % 4);
    EXPECT(reports.size() == 4, reports.size(), " errors in round ", i);
    bool found = false;
    for (const RankReport& report : reports) {
      if (report.kind != kind::kValue) continue;
      found = report.rank == rank && report.message == Long(i) && report.traceback == "where";
    }
    EXPECT(found, "the error is not whole in round ", i);
    ExpectPeers(reports, Text("rank ", rank, rank < 2 ? " on node a" : " on node b", " failed"), 1);
  }
  for (const RankReport& report : cluster.Round(kInternode, 0)) {
    EXPECT(report.kind == kind::kPeer ||
               Contains(report.message, "are on several nodes, and the backend shm"),
           report.message);
  }
  cluster.worker_table().ExpectValue(7);
  EXPECT_NO_ERROR(cluster.Round(kFetch, 7));
  EXPECT(cluster.worker_table().TakeValue(7) ==
         Long(7) + Long(8) + Long(9) + Long(3) + Long(4) + Long(5));
}

/*! \brief A rank that dies on one node is missed on all. */
void TestDeathOfARank() {
  for (uint64_t victim : {0, 3}) {
    Cluster cluster({2, 2}, Do);
    EXPECT_NO_ERROR(cluster.Round(kOnce, 0));
    const uint64_t ticket = cluster.Begin(kDie, victim);
    EXPECT(cluster.worker_table().WaitDone(ticket, 60) == WorkerTable::Progress::kAttention);
    const SessionReport report = Reports(cluster.worker_table(), 3);
    EXPECT(report.dead == std::vector<int>{static_cast<int>(victim)} && report.lost.empty());
    ExpectPeers(report.errors, Text("rank ", victim, " (pid ", getpid(), " on node ",
                                    victim < 2 ? "a" : "b", ") died"));
  }
}

/*! \brief A node whose link ends, or says nothing more, is lost with its ranks. */
void TestLossOfANode(bool silent) {
  const LinkTimes times{milliseconds(50), milliseconds(silent ? 1000 : 60000)};
  Cluster cluster({2, 2}, Do, {times});
  EXPECT_NO_ERROR(cluster.Round(kOnce, 0));
  const uint64_t ticket = cluster.Begin(kLoop, 0);
  usleep(5000);
  if (silent) {
    cluster.ring(1).Hold();
  } else {
    cluster.ring(1).Cut();
  }
  EXPECT(cluster.worker_table().WaitDone(ticket, 60) == WorkerTable::Progress::kAttention);
  const SessionReport report = Reports(cluster.worker_table(), 2);
  EXPECT((report.dead == std::vector<int>{2, 3}));
  EXPECT(report.lost.size() == 1 && Contains(report.lost[0], "node b (ranks 2 to 3) is lost: "));
  EXPECT(Contains(report.lost[0], silent ? "it sent nothing for 1 s" : "its connection"),
         report.lost[0]);
  ExpectPeers(report.errors, "node b (ranks 2 to 3) is lost");
  ExpectPeers(Reports(cluster.node(1).worker_table(), 2).errors,
              "connection to the controller is lost");
  const Error refused = ErrorOf([&] { cluster.worker_table().Recover(); });
  EXPECT(Contains(refused.what(), "cannot recover: node b (ranks 2 to 3) is lost"), refused.what());
}

/*! \brief The end of the session ends the waits on all nodes. */
void TestClosed() {
  Cluster cluster({1, 1, 1}, Do);
  const uint64_t ticket = cluster.Begin(kLoop, 0);
  cluster.controller().AbortClosed();
  EXPECT(cluster.worker_table().WaitDone(ticket, 60) == WorkerTable::Progress::kAttention);
  const SessionReport report = Reports(cluster.worker_table(), 3);
  ExpectPeers(report.errors, "the session was closed");
}

/*! \brief What a node says, by hand. */
class Speaker {
 public:
  Speaker(SessionServer& server, int node, const LinkTimes& times = {})
      : link_(Connect(server, node), times) {}
  Speaker(File socket, const LinkTimes& times) : link_(std::move(socket), times) {}

  void Say(Type type, int rank, uint64_t number = 0, const std::string& text = "") {
    link_.Send({type, rank, number, text});
    link_.Tick();
  }
  void SayAbort(uint32_t generation, AbortReason reason, int about) {
    link_.SendFirst({Type::kAbort, 77, uint64_t{generation} << 32 | AbortWord(reason, about), ""});
    link_.Tick();
  }
  /*! \brief The next message; false if the link breaks before, or none comes. */
  bool Hear(NodeMessage* message, int wait_ms = 30000) {
    const auto end = Clock::now() + milliseconds(wait_ms);
    while (!link_.Next(message)) {
      if (!link_.broken().empty() || Clock::now() > end) return false;
      std::vector<pollfd> polled;
      link_.Watch(&polled);
      const int patience = std::min(link_.Tick(), 5);
      if (poll(polled.data(), 1, patience) > 0 && polled[0].revents & POLLIN) link_.Receive();
    }
    return true;
  }
  NodeMessage Heard() {
    NodeMessage message;
    EXPECT(Hear(&message), link_.broken());
    return message;
  }
  void Come(int first, int last) {
    for (int rank = first; rank <= last; ++rank) {
      Say(Type::kGreeted, rank, 1000 + static_cast<uint64_t>(rank));
      Say(Type::kJoined, rank);
    }
  }
  NodeLink& link() { return link_; }

 private:
  static File Connect(SessionServer& server, int node) {
    auto [here, there] = TcpPair();
    server.Attach(node, std::move(there));
    return std::move(here);
  }
  NodeLink link_;
};

/*! \brief What comes late, of a generation that is over, ends nothing; what comes early is kept. */
void TestAbortsOfOtherGenerations() {
  SessionServer server(NodeOptions({1, 1}, -1, {}));
  Speaker a(server, 0), b(server, 1);
  a.Come(0, 0);
  b.Come(1, 1);
  EXPECT(server.worker_table().WaitJoined(30));
  b.Say(Type::kError, 1, 0, PackError("ValueError", "first", ""));
  b.SayAbort(0, AbortReason::kFailed, 1);
  NodeMessage heard = a.Heard();
  EXPECT(heard.type == Type::kAbort && heard.rank == 77 &&
         heard.number == AbortWord(AbortReason::kFailed, 1));
  a.Say(Type::kDone, 0, 1);
  b.Say(Type::kDone, 1, 1);
  EXPECT(server.worker_table().WaitDone(1, 30) == WorkerTable::Progress::kAttention);
  std::thread recovery([&] { server.worker_table().Recover(); });
  heard = a.Heard();
  EXPECT(heard.type == Type::kRecover && heard.number == 1);
  a.Say(Type::kRecovered, -1, 1);
  a.SayAbort(1, AbortReason::kDied, 0);  // right after, while the others are still at it
  NodeMessage none;
  EXPECT(b.Heard().type == Type::kRecover && !b.Hear(&none, 20));
  b.SayAbort(0, AbortReason::kFailed, 1);  // once more, late
  b.Say(Type::kRecovered, -1, 1);
  recovery.join();
  EXPECT(server.worker_table().Report().errors.empty());
  heard = b.Heard();
  EXPECT(heard.type == Type::kAbort &&
         heard.number == (uint64_t{1} << 32 | AbortWord(AbortReason::kDied, 0)));
  b.SayAbort(0, AbortReason::kFailed, 1);
  EXPECT(!b.Hear(&none, 20) && !a.Hear(&none, 20), "nothing more is to be told");
  EXPECT(server.worker_table().Report().lost.empty() && b.link().broken().empty());
}

/*! \brief Every node is told of every team, in order, and an answer comes after what was asked for.
 */
void TestTeams() {
  SessionServer server(NodeOptions({1, 1}, -1, {}));
  const std::string ranks[] = {std::string("\0\1", 2), std::string("\1\0", 2)};
  const uint64_t ids[] = {uint64_t{kFirstTeam} << 32 | 5, uint64_t{kFirstTeam + 1} << 32};
  Speaker a(server, 0);
  EXPECT(server.TeamOf({0, 1}, 5) == kFirstTeam);
  NodeMessage heard = a.Heard();
  EXPECT(heard.type == Type::kTeam && heard.number == ids[0] && heard.text == ranks[0]);
  Speaker b(server, 1);  // comes late
  b.Say(Type::kTeam, 1, 0, ranks[1]);
  for (int i : {0, 1}) {
    heard = b.Heard();
    EXPECT(heard.type == Type::kTeam && heard.number == ids[i] && heard.text == ranks[i]);
  }
  heard = b.Heard();
  EXPECT(heard.type == Type::kTeamsSent && heard.rank == 1);
  heard = a.Heard();
  EXPECT(heard.type == Type::kTeam && heard.number == ids[1] && heard.text == ranks[1]);
  b.Say(Type::kTeam, 1);  // nothing but an answer
  EXPECT(b.Heard().type == Type::kTeamsSent);
}

/*! \brief A node that cannot recover says why, and another attempt may succeed. */
void TestRefusedRecovery() {
  SessionServer server(NodeOptions({1, 1}, -1, {}));
  Speaker a(server, 0), b(server, 1);
  for (const char* why : {"it is busy", ""}) {
    std::string said;
    std::thread recovery([&] {
      try {
        server.worker_table().Recover();
      } catch (const Error& error) {
        said = error.what();
      }
    });
    for (Speaker* node : {&a, &b}) {
      const NodeMessage heard = node->Heard();
      EXPECT(heard.type == Type::kRecover && heard.number == 1);
      node->Say(Type::kRecovered, -1, 1, node == &b ? why : "");
    }
    recovery.join();
    EXPECT(*why ? Contains(said, "cannot recover: node b: it is busy") : said.empty(), said);
  }
  b.SayAbort(0, AbortReason::kFailed, 1);  // of what is over, and nothing has ended since
  NodeMessage none;
  EXPECT(!a.Hear(&none, 30), "an abort of the generation before ended this one");
}

/*! \brief A node that says what is not its to say is lost, and the others are told. */
void TestLies() {
  const uint64_t died = AbortWord(AbortReason::kDied, 0);
  const std::vector<NodeMessage> lies = {
      {Type::kDone, 0, 5, ""},
      {Type::kDied, 0, 0, ""},
      {Type::kJoined, -1, 0, ""},
      {Type::kLeft, 1 << 30, 0, ""},
      {Type::kRecovered, -1, 1, ""},
      {Type::kRecover, -1, 1, ""},
      {Type::kError, 1, 0, "no fields"},
      {Type::kTeam, 0, 0, std::string(1, 0)},
      {Type::kTeam, 1, 0, std::string(2, 0)},
      {Type::kTeam, 1, 0, std::string(1, 2)},
      {Type::kTeamsSent, 1, 0, ""},
      {Type::kAbort, -1, died, ""},
      {Type::kAbort, -1, AbortWord(AbortReason::kClosed, 0), ""},
      {Type::kAbort, -1, AbortWord(AbortReason::kFailed, 1000), ""},
      {Type::kAbort, -1, 0xff, ""},
  };
  for (const NodeMessage& lie : lies) {
    SessionServer server(NodeOptions({1, 1}, -1, {}));
    Speaker a(server, 0), b(server, 1);
    a.Come(0, 0);
    b.Come(1, 1);
    EXPECT(server.worker_table().WaitJoined(30));
    b.link().Send(lie);
    b.link().Tick();
    const NodeMessage heard = a.Heard();
    EXPECT(heard.type == Type::kAbort && heard.number == AbortWord(AbortReason::kNodeLost, 1));
    const SessionReport report = server.worker_table().Report();
    EXPECT(report.dead == std::vector<int>{1} && report.done[0] == 0);
    EXPECT(Contains(report.lost.at(0), "it sent a message that is not allowed"), report.lost[0]);
  }
}

/*! \brief Whatever a node says, spoilt anywhere, ends that node at most. */
void TestNonsense(double seconds, uint64_t seed) {
  std::mt19937_64 random(seed);
  size_t rounds = 0, lost = 0;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (; rounds < 5 || Clock::now() < end; ++rounds) {
    SessionServer server(NodeOptions({1, 1}, -1, {}));
    Speaker good(server, 0);
    good.Come(0, 0);
    auto [bad, there] = TcpPair();
    server.Attach(1, std::move(there));
    std::string bytes;
    for (uint64_t i = 1 + random() % 8; i-- > 0;) {
      NodeMessage message;
      message.type = static_cast<Type>(1 + random() % 14);
      message.rank = random() % 4 == 0 ? static_cast<int>(random() % 4) - 1 : 1;
      if (random() % 8 == 0) message.rank = static_cast<int>(random());
      message.number = random() % 8 == 0 ? random() : random() % 3;
      message.text = random() % 4 == 0 ? std::string(random() % 4, static_cast<char>(random() % 3))
                     : random() % 2 == 0 ? PackError("a", "b", "c")
                                         : std::string(random() % 50, 'x');
      const std::string packed = message.Pack();
      const auto type =
          static_cast<FrameType>(static_cast<uint32_t>(FrameType::kPiece) + random() % 3);
      bytes += Client::Framed(type, packed);
    }
    for (uint64_t i = random() % 4; i-- > 0;) {
      const size_t at = random() % bytes.size();
      if (random() % 2 == 0) bytes[at] = static_cast<char>(random());
      if (random() % 4 == 0) bytes.insert(at, 1 + random() % 20, static_cast<char>(random()));
      if (random() % 4 == 0) bytes.resize(at + 1);
    }
    EXPECT(send(bad.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0);
    good.Say(Type::kDone, 0, 3);
    const auto patience = Clock::now() + std::chrono::seconds(30);
    SessionReport report;
    do {
      report = server.worker_table().Report();
      EXPECT(Clock::now() < patience, "a good node is not heard any more");
    } while (report.done[0] != 3);
    bad = File();
    while ((report = server.worker_table().Report()).left.empty() && report.dead.empty()) {
      EXPECT(Clock::now() < patience, "the end of a node is not seen");
    }
    EXPECT(std::find(report.dead.begin(), report.dead.end(), 0) == report.dead.end());
    lost += report.lost.size();
  }
  std::printf("%zu nodes talked nonsense, %zu were lost\n", rounds, lost);
}

/*! \brief Urgent messages overtake large ones, which arrive whole; nobody waits in a link. */
void TestSlowReader() {
  auto [one, other] = UnixPair();
  Speaker sends(std::move(one), {});
  std::string large;
  for (int i = 0; i < 6; ++i) large += Long(i);
  const auto before = Clock::now();
  for (int rank : {1, 2}) sends.Say(Type::kValue, rank, 5, large);
  sends.SayAbort(4, AbortReason::kDied, 3);
  EXPECT(sends.link().full() && Clock::now() - before < std::chrono::seconds(20));
  {
    Speaker reads(std::move(other), {});
    std::thread pump([&] {
      NodeMessage none;
      EXPECT(!sends.Hear(&none));
      EXPECT(!sends.link().broken().empty());
    });
    EXPECT(reads.Heard().type == Type::kAbort);
    for (int rank : {1, 2}) {
      const NodeMessage heard = reads.Heard();
      EXPECT(heard.type == Type::kValue && heard.rank == rank && heard.text == large);
    }
    reads.link().GiveUp("");
    shutdown(reads.link().socket(), SHUT_RDWR);
    pump.join();
  }
  auto [writer, deaf] = UnixPair();
  Speaker waits(std::move(writer), {milliseconds(20), milliseconds(400)});
  for (int rank : {1, 2}) waits.Say(Type::kValue, rank, 5, large);
  NodeMessage none;
  EXPECT(!waits.Hear(&none) && Contains(waits.link().broken(), " for 0.4 s"),
         waits.link().broken());
}

/*! \brief What makes no session of nodes is refused. */
void TestInvitations() {
  const std::vector<Invitation> made = {Invitation::Make(), Invitation::Make()};
  const std::string all = PackInvitations({{2, made[0].Pack()}, {1, made[1].Pack()}});
  for (int rank : {0, 1, 2}) {
    EXPECT(InvitationOf(all, rank).token == made[rank / 2].token);
    EXPECT(InvitationOf(made[1].Pack(), rank).token == made[1].token);  // of one machine
  }
  for (const std::string& wrong : {all, all.substr(0, all.size() - 1), all.substr(0, 14)}) {
    const Error error = ErrorOf([&] { InvitationOf(wrong, wrong == all ? 3 : 2); });
    EXPECT(Contains(error.what(), "no node of the session has a rank"), error.what());
  }
}

void TestOptions() {
  auto refusal = [](SessionServerOptions options) {
    return std::string(ErrorOf([&] { SessionServer server(options); }).what());
  };
  SessionServerOptions options = NodeOptions({2, 2}, 0, {});
  options.num_ranks = 5;
  EXPECT(Contains(refusal(options), "the nodes have 4 ranks, the session has 5"));
  EXPECT(
      Contains(refusal(NodeOptions({2, 2}, 2, {})), "got 2 nodes, and this server is for node 2"));
  EXPECT(Contains(refusal(NodeOptions({2, 0}, 0, {})), "b has 0 ranks"));
  SessionServer alone(Options(1));
  EXPECT(Contains(ErrorOf([&] { alone.Attach(0, File()); }).what(), "on one machine"));
  SessionServer server(NodeOptions({2, 2}, 1, {}));
  Client client(server);
  const Frame answer = client.Introduce(client.hello(1, 4));
  EXPECT(
      Contains(answer.payload, "rank 1 does not belong to this node, which has the ranks 2 to 3"),
      answer.payload);
}

/*! \brief Both ends of a link stand still for longer than they bear silence, and then one alone. */
void TestStandstill() {
  auto [one, other] = UnixPair();
  const LinkTimes times{milliseconds(20), milliseconds(400)};
  Speaker a(std::move(one), times), b(std::move(other), times);
  auto none_broke = [&] { return a.link().broken().empty() && b.link().broken().empty(); };
  a.link().Tick();
  b.link().Tick();
  std::this_thread::sleep_for(milliseconds(500));
  a.link().Tick();
  b.link().Tick();
  EXPECT(none_broke(), a.link().broken(), b.link().broken());
  NodeMessage none;
  EXPECT(!a.Hear(&none) && Contains(a.link().broken(), "it sent nothing for 0.4 s"),
         a.link().broken());
}

/*! \brief A node that is ready long before others hears nothing of the controller until they are.
 */
void TestLateController() {
  SessionServerOptions options = NodeOptions({1, 1}, 0, {});
  options.link_times = {milliseconds(20), milliseconds(300)};
  SessionServer server(options);
  auto [here, there] = TcpPair();
  server.Attach(-1, std::move(there));
  std::this_thread::sleep_for(milliseconds(700));
  Speaker controller(std::move(here), options.link_times);
  NodeMessage none;
  EXPECT(!controller.Hear(&none, 100));
  EXPECT(controller.link().broken().empty(), controller.link().broken());
  // It has spoken, and its user stops it: its machine still acknowledges what comes.
  std::this_thread::sleep_for(milliseconds(700));
  EXPECT(!controller.Hear(&none, 100));
  EXPECT(controller.link().broken().empty(), controller.link().broken());
}

/*! \brief Where no kernel says whether the other end is there, silence ends a link. */
void TestSilentController() {
  SessionServerOptions options = NodeOptions({1, 1}, 0, {});
  options.link_times = {milliseconds(20), milliseconds(300)};
  SessionServer server(options);
  auto [here, there] = UnixPair();
  server.Attach(-1, std::move(there));
  std::this_thread::sleep_for(milliseconds(700));
  Speaker controller(std::move(here), options.link_times);
  NodeMessage none;
  EXPECT(!controller.Hear(&none, 100));
  EXPECT(controller.link().broken().empty(), controller.link().broken());
  std::this_thread::sleep_for(milliseconds(700));  // it has spoken, and is silent now
  EXPECT(!controller.Hear(&none) && Contains(controller.link().broken(), "its connection"),
         controller.link().broken());
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  using namespace tvm_ipc;
  TestOptions();
  TestInvitations();
  std::thread slow(TestSlowReader);  // it mostly waits, and so do others
  std::thread still(TestStandstill);
  std::thread late(TestLateController);
  std::thread silent(TestSilentController);
  TestAbortsOfOtherGenerations();
  TestRefusedRecovery();
  TestTeams();
  TestLies();
  TestNonsense(argc > 1 ? std::stod(argv[1]) : 0.3, argc > 2 ? std::stoull(argv[2]) : 1);
  TestErrorsAndRecovery();
  TestDeathOfARank();
  TestLossOfANode(false);
  TestLossOfANode(true);
  slow.join();
  still.join();
  late.join();
  silent.join();
  TestClosed();
  std::printf("passed\n");
  return 0;
}
