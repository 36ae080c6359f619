/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_handle_allgather.cc
 * \brief What ranks show each other through the hub: bytes and files, whole, in rank order, and of
 *        this exchange; and ranks that do not take part, do not read, or die.
 */
#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <chrono>
#include <random>
#include <string>
#include <vector>

#include "client.h"
#include "core/handle_allgather_via_session_server.h"
#include "expect.h"
#include "ranks.h"

namespace tvm_ipc {
namespace {

using Clock = std::chrono::steady_clock;

/*! \brief ThreadSanitizer takes ten times as long, most of it for what is shown. */
#ifdef __SANITIZE_THREAD__
constexpr uint64_t kRounds = 25;
#else
constexpr uint64_t kRounds = 100;
#endif

int OpenFiles() {
  int count = 0;
  DIR* dir = opendir("/proc/self/fd");
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

File FileWith(const std::string& text) {
  File file = MakeMemoryFile("tvm_ipc test", text.size());
  EXPECT(pwrite(file.get(), text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  return file;
}

std::string ContentOf(const File& file) {
  std::string text(FileBytes(file.get()), '\0');
  EXPECT(pread(file.get(), text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  return text;
}

struct Pair {
  File ends[2];
  Pair() {
    int made[2];
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM, 0, made) == 0);
    ends[0] = File(made[0]);
    ends[1] = File(made[1]);
  }
};

/*! \brief Frames of any size arrive whole and with their own files, however many lie in a row. */
void TestFrames() {
  std::mt19937_64 random(6);
  Pair pair;
  FrameReader reader;
  for (int round = 0; round < 200; ++round) {
    struct Sent {
      std::string payload;
      size_t files;
    };
    std::vector<Sent> sent;
    const size_t count = 1 + random() % 5;
    for (size_t i = 0; i < count; ++i) {
      sent.push_back({std::string(random() % 3 * (random() % 9000), 'a' + i), random() % 4});
      std::vector<File> files;
      for (size_t k = 0; k < sent[i].files; ++k) files.push_back(FileWith(Text(i, " ", k)));
      EXPECT(
          SendFrame(pair.ends[0].get(), FrameType::kShared, sent[i].payload, Descriptors(files)));
      if (random() % 2) EXPECT(reader.Read(pair.ends[1].get()));
    }
    EXPECT(reader.Read(pair.ends[1].get()));
    for (size_t i = 0; i < count; ++i) {
      Frame frame;
      EXPECT(reader.Next(&frame));
      EXPECT(frame.payload == sent[i].payload && !frame.lost_files);
      EXPECT(frame.files.size() == sent[i].files, frame.files.size(), " files");
      for (size_t k = 0; k < sent[i].files; ++k)
        EXPECT(ContentOf(frame.files[k]) == Text(i, " ", k));
    }
    Frame more;
    EXPECT(!reader.Next(&more));
  }
}

/*! \brief A frame is there when its last byte is. */
void TestFrameInPieces() {
  Pair pair;
  FrameReader reader;
  const std::string payload = "payload";
  const std::string bytes = AsBytes(FrameHeader{FrameType::kShared, 0, payload.size()}) + payload;
  for (size_t at = 0; at < bytes.size(); ++at) {
    Frame frame;
    EXPECT(!reader.Next(&frame), "after ", at, " of ", bytes.size(), " bytes");
    EXPECT(write(pair.ends[0].get(), bytes.data() + at, 1) == 1);
    EXPECT(reader.Read(pair.ends[1].get()));
  }
  Frame frame;
  EXPECT(reader.Next(&frame) && frame.payload == payload);
}

/*! \brief Where there is no descriptor for a file, its frame says so, and the next has its own. */
void TestLostFiles() {
  Pair pair;
  const File one = FileWith("one");
  const int here = pair.ends[0].get();
  EXPECT(SendFrame(here, FrameType::kShared, "first", {one.get(), one.get(), one.get()}));
  EXPECT(SendFrame(here, FrameType::kShared, "second", {one.get()}));
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few{static_cast<rlim_t>(File(dup(here)).get()) + 2, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  FrameReader reader;
  EXPECT(reader.Read(pair.ends[1].get()));
  setrlimit(RLIMIT_NOFILE, &before);
  Frame frame;
  EXPECT(reader.Next(&frame) && frame.payload == "first" && frame.lost_files);
  frame = Frame{};
  EXPECT(reader.Next(&frame) && frame.payload == "second");
  EXPECT(frame.lost_files || ContentOf(frame.files.at(0)) == "one");
}

enum Action { kExpose, kLate, kDisagree, kDie, kLeave };

/*! \brief What a rank shows in a round; some of it is more than a socket holds. */
std::string ExposedBuffer(int rank, uint64_t seed) {
  std::mt19937_64 random(seed * 100 + static_cast<uint64_t>(rank));
  return std::string(random() % 4 == 0 ? random() % (1 << 19) : random() % 100,
                     static_cast<char>('a' + rank)) +
         Text(seed);
}

void ExposeAndRead(Rank& rank, uint64_t seed, const std::string& what) {
  Exported mine;
  mine.bytes = ExposedBuffer(rank.id(), seed);
  const size_t files = (seed + static_cast<uint64_t>(rank.id())) % 3;
  for (size_t k = 0; k < files; ++k) mine.files.push_back(FileWith(Text(rank.id(), k, seed)));
  const std::vector<Exported> all = AllGatherHandles(rank, what, std::move(mine));
  EXPECT(all.size() == static_cast<size_t>(rank.num_ranks()));
  for (int i = 0; i < rank.num_ranks(); ++i) {
    EXPECT(all[i].bytes == ExposedBuffer(i, seed), "rank ", i, " showed something else");
    EXPECT(all[i].files.size() == (seed + static_cast<uint64_t>(i)) % 3);
    for (size_t k = 0; k < all[i].files.size(); ++k) {
      EXPECT(ContentOf(all[i].files[k]) == Text(i, k, seed));
    }
  }
}

void Do(Rank& rank, const Order& order) {
  auto rest = [&] {  // until the others have given up
    while (rank.control().abort.load() == 0) usleep(1000);
  };
  if (order.action == kLate && rank.id() == 1) return rest();
  if (order.action == kDie && rank.id() == 1) {
    while (true) pause();
  }
  if (order.action == kLeave && rank.id() == 1) {
    // It shows what the others wait for, and fails before it has read what they showed.
    const uint32_t count = rank.control().ranks[1].handle_all_gathers.fetch_add(1) + 1;
    const uint64_t number = uint64_t{rank.control().generation.load()} << 32 | count;
    std::string payload = AsBytes(HandleAllGatherHeader{number, 1, 0}) + PackField("memory");
    payload += ExposedBuffer(1, order.seed);
    EXPECT(rank.connection().Send(FrameType::kShared, payload, {}));
    usleep(50000);
    Fail(kind::kValue, "rank 1 was told to fail");
  }
  const bool other = order.action == kDisagree && rank.id() == 1;
  ExposeAndRead(rank, order.seed, other ? "the memory of team 5" : "memory");
}

/*! \brief Everybody sees what everybody showed, round after round, and no file stays open. */
void TestRounds(Ranks::Kind kind, int num_ranks) {
  const int before = OpenFiles();
  {
    Ranks ranks(kind, Options(num_ranks), 1, Do);
    for (uint64_t seed = 0; seed < kRounds; ++seed) {
      EXPECT_NO_ERROR(ranks.Round(kExpose, seed));
    }
  }
  EXPECT(OpenFiles() == before, OpenFiles() - before, " files stay open");
}

/*! \brief Who does not come is named; what the others showed then is no part of what comes after.
 */
void TestLateRank() {
  Ranks ranks(Ranks::Kind::kThreads, Options(3, kShortTimeout), 1, Do);
  for (uint64_t seed = 0; seed < 3; ++seed) {
    int deadlines = 0;
    for (const RankReport& report : ranks.Round(kLate, seed)) {
      if (report.kind == kind::kPeer) continue;
      EXPECT(report.kind == std::string(kind::kDeadline), report.kind, ": ", report.message);
      EXPECT(Contains(report.message,
                      Text("the exchange of memory waited ", kShortTimeout, " s for rank 1 (pid ")),
             report.message);
      EXPECT(!Contains(report.message, "rank 2 (pid "), report.message);
      ++deadlines;
    }
    EXPECT(deadlines > 0);
    for (uint64_t next = 10; next < 14; ++next) {
      EXPECT_NO_ERROR(ranks.Round(kExpose, next));
    }
  }
}

/*! \brief What a rank did not read before it failed is no part of its next exchange. */
void TestAnswersLeftBehind() {
  Ranks ranks(Ranks::Kind::kThreads, Options(3), 1, Do);
  for (uint64_t seed = 2; seed < 60; seed += 3) {  // of which rank 1 shows no files
    EXPECT(!ranks.Round(kLeave, seed).empty());
    EXPECT_NO_ERROR(ranks.Round(kExpose, seed + 100));
  }
}

/*! \brief Ranks that exchange different things are told so, and not given each other's. */
void TestDisagreement() {
  Ranks ranks(Ranks::Kind::kThreads, Options(3), 1, Do);
  const std::vector<RankReport> reports = ranks.Round(kDisagree, 1);
  EXPECT(!reports.empty());
  for (const RankReport& report : reports) {
    if (report.kind == kind::kPeer) continue;
    EXPECT(report.kind == std::string(kind::kMismatch), report.kind, ": ", report.message);
    EXPECT(Contains(report.message, "rank 1 exchanges the memory of team 5"), report.message);
  }
  EXPECT_NO_ERROR(ranks.Round(kExpose, 2));
}

/*! \brief A death ends the exchange of those who live. */
void TestDeath() {
  Ranks ranks(Ranks::Kind::kProcesses, Options(3), 1, Do);
  ranks.Begin(kDie, 3);
  usleep(20000);
  const auto before = Clock::now();
  ranks.Kill(1);
  SessionReport report;
  while (report.errors.size() < 2) {
    EXPECT(Clock::now() - before < std::chrono::seconds(10), "peers go on waiting");
    usleep(1000);
    report = ranks.server().worker_table().Report();
  }
  for (const RankReport& error : report.errors) {
    EXPECT(error.kind == std::string(kind::kPeer) && Contains(error.message, "rank 1 (pid "),
           error.message);
  }
  ranks.GiveUp();
}

/*! \brief A rank that shows much and reads nothing holds up nobody else. */
void TestDeafRank() {
  SessionServer server(Options(2));
  Client deaf(server), other(server);
  EXPECT(deaf.Join(0, 2) && other.Join(1, 2));
  const std::string much(3 << 20, 'm');
  for (Client* client : {&deaf, &other}) {
    client->Write(Client::Framed(
        FrameType::kShared, AsBytes(HandleAllGatherHeader{1, 0, 0}) + PackField("memory") + much));
  }
  for (int rank = 0; rank < 2; ++rank) {
    const Frame frame = other.Answer();
    HandleAllGatherHeader header;
    memcpy(&header, frame.payload.data(), sizeof(header));
    EXPECT(header.number == 1 && header.rank == rank && frame.payload.size() > much.size());
  }
  other.Write(Client::Framed(FrameType::kDone, AsBytes(uint64_t{4})));
  deaf.Write(Client::Framed(FrameType::kDone, AsBytes(uint64_t{4})));
  EXPECT(server.worker_table().WaitDone(4, 30) == WorkerTable::Progress::kDone);
  deaf.Leave();
  EXPECT(server.worker_table().WaitDone(5, 30) == WorkerTable::Progress::kAttention);
  EXPECT(server.worker_table().Report().dead == std::vector<int>{0});
}

}  // namespace
}  // namespace tvm_ipc

int main() {
  using namespace tvm_ipc;
  TestFrames();
  TestFrameInPieces();
  TestLostFiles();
  TestDeafRank();
  for (int num_ranks : {1, 2, 5}) TestRounds(Ranks::Kind::kThreads, num_ranks);
  TestRounds(Ranks::Kind::kProcesses, 3);
  TestLateRank();
  TestAnswersLeftBehind();
  TestDisagreement();
  TestDeath();
  std::printf("passed\n");
  return 0;
}
