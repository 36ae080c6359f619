/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_cuda_protocol.cc
 * \brief How the CUDA kernels of several ranks go together: many operations with ranks that dawdle,
 *        epochs that wrap, ranks that disagree, come late or not at all, and what comes after.
 */
#include "cuda_reductions.h"

namespace tvm_ipc {
namespace kernels {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr int kRounds = 60;
#else
constexpr int kRounds = 200;
#endif

/*! \brief A case that depends on the round alone, and is right for all sizes. */
Case CaseOf(uint64_t round, int size, Launch launch) {
  Case one;
  const uint64_t random = Mixed(round);
  one.type = kTypes[random % 5];
  one.kind = random / 8 % 4;
  one.path = static_cast<Path>(1 + random / 64 % 3);
  one.operation = random / 512 % 3 == 0 && one.path != Path::kPush ? kReduceScatter : kAllReduce;
  const uint64_t counts[] = {0, 1, 3, 40, 300, 1000};
  one.count = counts[random / 4096 % 6];
  if (one.operation == kReduceScatter) one.count *= size;
  one.in_place = random / 65536 % 2;
  one.shift = random / (1 << 20) % 4;
  one.launch = launch;
  one.seed = round;
  return one;
}

void Meet(Members& members, int place, Stream& stream) {
  BarrierArgs args{};
  args.team = members.Args(place);
  args.header.operation = kBarrier;
  stream.Launch("tvm_ipc_barrier", args, {1, 1, 1});
}

/*!
 * \brief Different operations one after the other, with ranks and threads that dawdle anywhere.
 *        Inputs are overwritten on return, and every result is compared.
 */
void ManyRounds(int size, int rounds, Launch launch, uint32_t dawdle, uint32_t epoch = 0) {
  Members members(size);
  for (int place = 0; place < size; ++place) members.team_slot(place).epoch = epoch;
  members.Run(
      [&](int place, Stream& stream) {
        for (int round = 1; round <= rounds; ++round) {
          // A rank that is late now and then: the others are ahead of it by as much as they can.
          if (Mixed(round * 16 + place) % 16 == 0) usleep(Mixed(round) % 500);
          Reduce(members, place, stream, CaseOf(round, size, launch), round & 1);
          if (round % 7 == 0) Meet(members, place, stream);
        }
      },
      dawdle);
  members.ExpectNoError();
  const uint32_t last = members.team_slot(0).epoch;
  for (int place = 0; place < size; ++place) {
    EXPECT(members.team_slot(place).epoch == last, "all have done as many");
    EXPECT(members.team_slot(place).arrived == 0 && members.team_slot(place).failed == 0);
  }
}

/*! \brief What nobody may read any more may be written, and what may be read has to be left. */
void LeavesEarly(int size) {
  Members members(size);
  members.Run(
      [&](int place, Stream& stream) {
        for (int round = 1; round <= 40; ++round) {
          Case one;
          one.type = kTypes[2];
          one.path = Path::kPull;
          one.operation = kReduceScatter;
          one.count = 100 * size;
          // Some of them; the others are told all the same.
          one.leave_early = (round + place) % 3 != 0;
          one.seed = round;
          Reduce(members, place, stream, one, 0);
          // In the other half of the region, for what may still be read is in this one.
          one.operation = kAllReduce;
          one.leave_early = false;
          Reduce(members, place, stream, one, 1);
        }
      },
      100);
  members.ExpectNoError();
}

/*! \brief Words of long ago are never taken for those of an epoch with the same number. */
void EpochsComeBack() {
  constexpr int kSize = 2;
  constexpr uint32_t kThen = 5 << 20;
  Members members(kSize);
  Case large;
  large.type = kTypes[2];
  large.count = PushBytes(kSize) / 4;
  large.seed = 1;
  Case small = large;
  small.count = 10;
  const auto run = [&](uint32_t epoch, std::vector<Case> cases) {
    for (int place = 0; place < kSize; ++place) members.team_slot(place).epoch = epoch - 1;
    members.Run([&](int place, Stream& stream) {
      for (const Case& one : cases) Reduce(members, place, stream, one);
    });
    members.ExpectNoError();
  };
  run(kThen, {large});
  // Two to the thirty-two epochs later; few of those between have to be done.
  for (uint32_t epoch : {1u << 30, 2u << 30, 3u << 30}) {
    run(epoch - 1, {small, small, small});
    EXPECT(members.team_slot(0).epoch == epoch + 1);
  }
  run(~0u - 1, {small, small, small, small});
  EXPECT(members.team_slot(0).epoch == 3, members.team_slot(0).epoch);
  large.seed = 2;
  // A rank that is ready first finds none of the words of then.
  for (int place = 0; place < kSize; ++place) {
    const auto* words =
        reinterpret_cast<const uint64_t*>(members.team_slot(place).stage[kThen & 1]);
    for (uint64_t i = 0; i < kStageBytes / 8; ++i) {
      // Of each member the small ones have left some.
      EXPECT(words[i] == 0 || i % (kStageBytes / 16) < 16, i);
    }
  }
  run(kThen, {large});
}

/*! \brief One member does something else: all of them learn what it is. */
void Disagreement(int size, Path path, const std::function<void(Header&)>& change) {
  Members members(size);
  members.Run([&](int place, Stream& stream) {
    ReduceArgs args{};
    args.team = members.Args(place);
    Case one;
    one.type = kTypes[2];
    one.count = 100;
    one.path = path;
    args.header = HeaderOf(one);
    args.header.scratch = Members::kScratch;
    if (place == size - 1) change(args.header);
    args.send = members.region(place);
    args.recv = members.region(place) + 4096;
    args.scratch = members.region(place) + Members::kScratch;
    stream.Launch(std::string("tvm_ipc_") + NameOf(path) + "float32", args, {2, 2, 1});
    const ErrorRecord& error = members.error(place);
    EXPECT(error.code == kMismatch, "member ", place, ": code ", error.code, ", phase ",
           error.phase);
    EXPECT(error.epoch == 1 && error.phase == kForHeader);
    if (place == size - 1) {
      EXPECT(error.member != place && error.theirs.count == 100);
    } else {
      EXPECT(error.member == size - 1, error.member);
    }
    const Header mine = args.header;
    EXPECT(error.mine.count == mine.count && error.mine.mode == mine.mode, place);
    EXPECT(std::memcmp(&error.mine, &error.theirs, kComparedWords * 4) != 0, place);
    // What follows leaves at once.
    stream.Launch(std::string("tvm_ipc_") + NameOf(path) + "float32", args, {2, 2, 1});
    EXPECT(members.team_slot(place).epoch == 0);
  });
  members.Zero();
  members.Run([&](int place, Stream& stream) {
    for (int round = 1; round <= 10; ++round) {
      Reduce(members, place, stream, CaseOf(round, size, {2, 2, 1}));
    }
  });
  members.ExpectNoError();
}

/*! \brief A member does not come: the others tell whom they waited for, by the deadline or before.
 */
void Absence(int size, Path path, bool aborted) {
  Members members(size, aborted ? 60 : 0.05);
  members.Run([&](int place, Stream& stream) {
    if (place == 1) {
      if (!aborted) return;
      usleep(20000);
      members.abort() = 1;
      return;
    }
    ReduceArgs args{};
    args.team = members.Args(place);
    Case one;
    one.type = kTypes[2];
    one.count = 100;
    one.path = path;
    args.header = HeaderOf(one);
    args.send = members.region(place);
    args.recv = members.region(place) + 4096;
    args.scratch = members.region(place) + Members::kScratch;
    stream.Launch(std::string("tvm_ipc_") + NameOf(path) + "float32", args, {2, 2, 1});
    const ErrorRecord& error = members.error(place);
    EXPECT(error.code == (aborted ? kAborted : kDeadline), error.code);
    EXPECT(aborted || error.member == 1, error.member);
    EXPECT(error.mine.count == 100);
    EXPECT(members.team_slot(place).failed == 1 && members.team_slot(place).epoch == 0);
  });
  members.Zero();
  members.Run([&](int place, Stream& stream) {
    Reduce(members, place, stream, CaseOf(11, size, {1, 1, 1}));
  });
  members.ExpectNoError();
}

/*! \brief A wait without an end in sight is no wait that has ended. */
void LongestDeadline() {
  Members members(2);
  members.Run([&](int place, Stream& stream) {
    if (place == 1) usleep(30000);
    BarrierArgs args{};
    args.team = members.Args(place);
    args.team.guard.timeout = ~0ull;
    args.header.operation = kBarrier;
    stream.Launch("tvm_ipc_barrier", args);
  });
  members.ExpectNoError();
}

MessageArgs Message(Members& members, int place, bool sends, uint64_t bytes) {
  const int peer = 1 - place;
  MessageArgs args{};
  args.guard = members.GuardOf(place, &members.channels(place).failed);
  args.header.operation = kSend;
  args.header.count = bytes;
  args.peer = peer;
  args.send_queue = sends ? &members.channels(place).out[peer] : &members.channels(peer).out[place];
  args.receive_queue =
      sends ? &members.channels(peer).in[place] : &members.channels(place).in[peer];
  args.send = args.recv = members.region(place);
  args.bytes = bytes;
  return args;
}

void MessagesThatFail() {
  Members members(2, 0.05);
  Stream stream;
  // Two packets of a lane are sent without a receiver, and not a third.
  for (int i = 0; i < 2; ++i) stream.Launch("tvm_ipc_send", Message(members, 0, true, 64));
  EXPECT(members.error(0).code == kNoError);
  stream.Launch("tvm_ipc_send", Message(members, 0, true, 64));
  EXPECT(members.error(0).code == kDeadline && members.error(0).phase == kForCredit);
  EXPECT(members.error(0).member == 1 && members.error(0).epoch == 3);
  // The receiver wants something else.
  stream.Launch("tvm_ipc_receive", Message(members, 1, false, 65), {1, 2, 1});
  EXPECT(members.error(1).code == kMismatch && members.error(1).theirs.count == 64);
  EXPECT(members.error(1).mine.count == 65 && members.error(1).member == 0);
  members.Zero();
  stream.Launch("tvm_ipc_receive", Message(members, 1, false, 64));
  EXPECT(members.error(1).code == kDeadline && members.error(1).phase == kForMessage);
  members.Zero();
  ExposeArgs args{};
  args.team = members.Args(0);
  args.member = 1;
  args.number = 1;
  stream.Launch("tvm_ipc_await", args);
  EXPECT(members.error(0).code == kDeadline && members.error(0).phase == kForExposed);
  members.Zero();
  stream.Launch("tvm_ipc_send", Message(members, 0, true, 64));
  stream.Launch("tvm_ipc_receive", Message(members, 1, false, 64));
  members.ExpectNoError();
}

}  // namespace
}  // namespace kernels
}  // namespace tvm_ipc

int main() {
  using namespace tvm_ipc::kernels;  // NOLINT
  ManyRounds(2, kRounds, {1, 1, 1}, 0);
  ManyRounds(3, kRounds, {1, 1, 1}, 200);
  ManyRounds(3, kRounds / 3, {2, 2, 1}, 200);
  ManyRounds(4, kRounds / 3, {3, 1, 1}, 100);
  ManyRounds(8, kRounds / 4, {1, 1, 1}, 100);
  for (uint32_t epoch : {~0u - 20, (1u << 30) - 20}) ManyRounds(3, 40, {1, 2, 1}, 50, epoch);
  LeavesEarly(3);
  EpochsComeBack();
  for (Path path : {Path::kPush, Path::kPushSlices, Path::kPull}) {
    Disagreement(3, path, [](Header& header) { header.count = 90; });
    Disagreement(2, path, [](Header& header) { header.mode = Mode(kMax, 3, 0); });
    Absence(3, path, false);
    Absence(3, path, true);
  }
  Disagreement(2, Path::kPush, [](Header& header) { header.parts = 1ull << 40; });
  Disagreement(2, Path::kPush, [](Header& header) { header.root = 1; });
  LongestDeadline();
  MessagesThatFail();
  std::printf("ok\n");
}
