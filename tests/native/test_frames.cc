/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_frames.cc
 * \brief Frames from anybody: cut anywhere, spoilt anywhere, longer than they may be, or nonsense.
 *
 * `test_frames <seconds> [<seed>]` corrupts streams for so many seconds, and at least twenty.
 */
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/frame.h"
#include "expect.h"

namespace tvm_ipc {
namespace {

using Clock = std::chrono::steady_clock;
using Random = std::mt19937_64;

constexpr uint64_t kLimit = 5000;
/*! \brief What a reader may keep beside the bytes of one frame: what it has read at once. */
constexpr size_t kChunk = 64 << 10;

struct Pair {
  Pair() : something(open("/dev/null", O_RDONLY | O_CLOEXEC)) {
    int ends[2];
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    write = File(ends[0]);
    read = File(ends[1]);
  }
  File write, read, something;
};

FrameLimits Limits() {
  FrameLimits limits;
  limits.bytes = kLimit;
  limits.files = 3;
  return limits;
}

std::string Header(FrameType type, uint64_t bytes, uint32_t files = 0) {
  return AsBytes(FrameHeader{type, files, bytes});
}

std::string RandomBytes(Random& random, size_t bytes) {
  std::string text(bytes, '\0');
  for (char& byte : text) byte = static_cast<char>(random());
  return text;
}

std::string RandomPayload(Random& random) {
  if (random() % 8 == 0) return "";
  if (random() % 2 == 0) return RandomBytes(random, random() % (kLimit + 1));
  return PackError("ValueError", RandomBytes(random, random() % 100), "where");
}

FrameType RandomType(Random& random) { return static_cast<FrameType>(1 + random() % 10); }

int OpenFiles() {
  int count = 0;
  for (int i = 0; i < 256; ++i) count += fcntl(i, F_GETFD) >= 0;
  return count;
}

/*! \brief What comes in any pieces comes out as it was, with its files. */
void TestCuts(Random& random) {
  Pair pair;
  FrameReader reader(Limits());
  std::vector<std::pair<FrameType, std::string>> sent;
  std::vector<uint32_t> files;
  size_t seen = 0;
  auto look = [&] {
    EXPECT(reader.Read(pair.read.get()));
    Frame frame;
    for (; reader.Next(&frame); ++seen) {
      EXPECT(frame.type == sent[seen].first && frame.payload == sent[seen].second);
      EXPECT(frame.files.size() == files[seen] && !frame.lost_files);
    }
  };
  for (int i = 0; i < 20; ++i) {
    sent.push_back({RandomType(random), RandomPayload(random)});
    files.push_back(random() % 4 == 0 ? random() % 4 : 0);
    const std::string bytes =
        Header(sent.back().first, sent.back().second.size(), files.back()) + sent.back().second;
    for (size_t at = 0; at < bytes.size();) {
      // The header goes with the files, as SendFrame sends it.
      size_t some = random() % 3 == 0 ? bytes.size() : 1 + random() % 700;
      if (at == 0 && files.back() > 0) some = std::max(some, sizeof(FrameHeader));
      some = std::min(some, bytes.size() - at);
      const std::vector<int> with(at == 0 ? files.back() : 0, pair.something.get());
      EXPECT(SendSome(pair.write.get(), bytes.data() + at, some, with, 0) ==
             static_cast<int64_t>(some));
      at += some;
      if (random() % 2 == 0) look();
    }
  }
  look();
  EXPECT(seen == sent.size() && reader.held() == 0 && reader.drained());
}

/*! \brief A header with files is cut by the end of what is read at once, and one with others
 * follows.
 */
void TestHeaderAtTheEndOfARead() {
  Pair pair;
  FrameReader reader(Limits());
  size_t plain = 0;
  for (size_t left = kChunk - sizeof(FrameHeader) / 2; left > 0; ++plain) {
    const size_t bytes = std::min<size_t>(left, 2048);
    EXPECT(SendFrame(pair.write.get(), FrameType::kShared,
                     std::string(bytes - sizeof(FrameHeader), 'x'), {}));
    left -= bytes;
  }
  for (int files : {1, 2}) {
    EXPECT(SendFrame(pair.write.get(), FrameType::kShared, Text(files),
                     std::vector<int>(static_cast<size_t>(files), pair.something.get())));
  }
  EXPECT(reader.Read(pair.read.get()), strerror(errno));
  Frame frame;
  for (size_t i = 0; i < plain; ++i) EXPECT(reader.Next(&frame) && frame.files.empty());
  for (int files : {1, 2}) {
    EXPECT(reader.Next(&frame) && frame.payload == Text(files));
    EXPECT(frame.files.size() == static_cast<size_t>(files) && !frame.lost_files);
  }
  EXPECT(!reader.Next(&frame));
}

/*! \brief What is spoilt comes out within the limits, or ends the reader; it keeps little. */
void TestSpoilt(Random& random) {
  std::string bytes;
  for (uint64_t i = random() % 6; i-- > 0;) {
    const std::string payload = RandomPayload(random);
    bytes += Header(RandomType(random), payload.size()) + payload;
  }
  if (random() % 3 == 0) bytes += RandomBytes(random, random() % 300);
  for (uint64_t i = random() % 4; i-- > 0 && !bytes.empty();) {
    const size_t at = random() % bytes.size();
    switch (random() % 4) {
      case 0:
        bytes[at] = static_cast<char>(random());
        break;
      case 1:
        bytes.erase(at, random() % 20);
        break;
      case 2:
        bytes.insert(at, RandomBytes(random, random() % 20));
        break;
      default:
        bytes.insert(at, Header(RandomType(random), random() >> (random() % 64),
                                static_cast<uint32_t>(random() >> (32 + random() % 32))));
    }
  }
  Pair pair;
  FrameReader reader(Limits());
  size_t sent = 0;
  for (bool more = true; more;) {
    const size_t some = std::min<size_t>(bytes.size() - sent, 1 + random() % 4000);
    // Sometimes with files, which nobody announced or which are too many.
    const std::vector<int> with(random() % 10 == 0 && some > 0 ? random() % 5 : 0,
                                pair.something.get());
    if (some > 0) EXPECT(SendSome(pair.write.get(), bytes.data() + sent, some, with, 0) > 0);
    sent += some;
    if (sent == bytes.size()) pair.write = File();
    more = reader.Read(pair.read.get());
    const int error = errno;
    EXPECT(more || error == 0 || error == EPROTO, strerror(error));
    EXPECT(reader.held() <= kLimit + sizeof(FrameHeader) + kChunk);
    Frame frame;
    while (reader.Next(&frame)) {
      EXPECT(frame.payload.size() <= kLimit && frame.files.size() <= 3);
      EXPECT(frame.type >= FrameType::kHello && frame.type <= FrameType::kRefusal);
      size_t position = random() % (frame.payload.size() + 2);
      std::string text = "as before";
      while (TakeField(frame.payload, &position, &text)) {
        EXPECT(position <= frame.payload.size());
      }
    }
    if (!more && error == EPROTO) {
      EXPECT(!reader.Read(pair.read.get()) && errno == EPROTO && reader.held() == 0,
             "after nonsense nothing is believed");
    }
  }
}

/*! \brief A field that is not all there is none, whatever length it says it has. */
void TestFields() {
  const std::string payload = PackField("one") + PackField("") + PackField("two");
  size_t position = 0;
  std::string text;
  for (const char* expected : {"one", "", "two"}) {
    EXPECT(TakeField(payload, &position, &text) && text == expected);
  }
  EXPECT(position == payload.size() && !TakeField(payload, &position, &text) && text == "two");
  for (size_t end = 0; end < 11; ++end) {
    position = 0;
    EXPECT(!TakeField(payload.substr(0, end), &position, &text) && position == 0);
  }
  for (uint64_t length : {uint64_t{4}, ~uint64_t{0}, ~uint64_t{7}, uint64_t{1} << 63}) {
    position = 0;
    EXPECT(!TakeField(AsBytes(length) + "one", &position, &text));
  }
  position = ~size_t{0};
  EXPECT(!TakeField(payload, &position, &text));
}

/*! \brief What announces too much is refused before it comes. */
void TestLimits() {
  auto refused = [](const std::string& bytes) {
    Pair pair;
    FrameReader reader(Limits());
    EXPECT(SendSome(pair.write.get(), bytes.data(), bytes.size(), {}, 0) > 0);
    return !reader.Read(pair.read.get()) && errno == EPROTO;
  };
  EXPECT(!refused(Header(FrameType::kValue, kLimit)));
  EXPECT(refused(Header(FrameType::kValue, kLimit + 1)));
  EXPECT(refused(Header(FrameType::kValue, ~uint64_t{0})));
  EXPECT(!refused(Header(FrameType::kShared, 5, 3)) && refused(Header(FrameType::kShared, 5, 4)));
  EXPECT(refused(Header(static_cast<FrameType>(0), 0)));
  EXPECT(refused(Header(static_cast<FrameType>(11), 0)));
  EXPECT(refused(Header(FrameType::kBye, 0) + "GET / HTTP/1.1\r\n\r\n"));
}

/*! \brief One who never stops is heard for a while, then others are. */
void TestEndless() {
  Pair pair;
  const int room = 4 << 20;
  EXPECT(setsockopt(pair.write.get(), SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof(room)) == 0 ||
         setsockopt(pair.write.get(), SOL_SOCKET, SO_SNDBUF, &room, sizeof(room)) == 0);
  FrameReader reader(Limits());
  const std::string frame = Header(FrameType::kValue, kLimit) + std::string(kLimit, 'x');
  std::string bytes;
  while (bytes.size() < (3 << 20)) bytes += frame;
  const int64_t sent = SendSome(pair.write.get(), bytes.data(), bytes.size(), {}, MSG_DONTWAIT);
  EXPECT(sent > 0);
  size_t calls = 0, frames = 0;
  Frame got;
  do {
    EXPECT(reader.Read(pair.read.get()));
    ++calls;
    size_t these = 0;
    for (; reader.Next(&got); ++frames) ++these;
    EXPECT(these <= (size_t{1} << 20) / kLimit + kChunk / kLimit + 1, these, " frames at once");
  } while (!reader.drained());
  EXPECT(frames == static_cast<size_t>(sent) / frame.size(), frames, " frames of ", sent, " bytes");
  EXPECT(calls > static_cast<size_t>(sent) >> 20);
}

/*!
 * \brief Files that nobody has received yet count against the sender's limit of open files, unless
 *        it is root: a sender waits until they are received.
 */
void TestManyFilesOnTheWay() {
  constexpr int kFrames = 8, kFiles = 32, kLimitOfFiles = 64, kWithoutWaiting = 3;
  const pid_t sender = fork();
  EXPECT(sender >= 0);
  int status = 0;
  if (sender > 0) {
    EXPECT(waitpid(sender, &status, 0) == sender && status == 0, "files were not sent");
    return;
  }
  if (geteuid() == 0 && setuid(65534) != 0) _exit(2);
  Pair pair;
  const pid_t receiver = fork();
  if (receiver == 0) {
    pair.write = File();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    FrameReader reader;
    Frame frame;
    int received = 0;
    for (bool more = true; more;) {
      more = reader.Read(pair.read.get());
      while (reader.Next(&frame)) received += frame.files.size() == kFiles ? 1 : 0;
    }
    _exit(received == kFrames ? 0 : 3);
  }
  const rlimit limit{kLimitOfFiles, kLimitOfFiles};
  const std::vector<int> files(kFiles, pair.something.get());
  bool sent = receiver > 0 && setrlimit(RLIMIT_NOFILE, &limit) == 0;
  for (int i = 0; i < kFrames; ++i) {
    if (i == kWithoutWaiting) {
      sent = sent && SendSome(pair.write.get(), "x", 1, files, MSG_DONTWAIT) < 0 && errno == EAGAIN;
    }
    sent = sent && SendFrame(pair.write.get(), FrameType::kWelcome, "files", files);
  }
  pair.write = File();
  _exit(waitpid(receiver, &status, 0) == receiver && sent && status == 0 ? 0 : 1);
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  using namespace tvm_ipc;
  const double seconds = argc > 1 ? std::stod(argv[1]) : 0.2;
  const uint64_t seed = argc > 2 ? std::stoull(argv[2]) : 1;
  TestFields();
  TestLimits();
  TestEndless();
  const int before = OpenFiles();
  TestHeaderAtTheEndOfARead();
  TestManyFilesOnTheWay();
  Random random(seed);
  size_t rounds = 0;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (; rounds < 20 || Clock::now() < end; ++rounds) {
    TestSpoilt(random);
    if (rounds % 10 == 0) TestCuts(random);
  }
  EXPECT(OpenFiles() == before, "descriptors are left");
  std::printf("passed, %zu spoilt streams\n", rounds);
  return 0;
}
