/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_wait.cc
 * \brief Waiting in all three ways: nobody is missed, nothing is seen too early, and every wait
 *        has an end.
 */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <thread>
#include <vector>

#include "core/wait.h"
#include "expect.h"

namespace {

using tvm_ipc::Ordered;
using tvm_ipc::Publish;
using tvm_ipc::WaitFor;
using tvm_ipc::WaitPolicy;
using tvm_ipc::WaitResult;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr WaitPolicy kSpin{1u << 30, 0};
constexpr WaitPolicy kYield{0, 1u << 30};
constexpr WaitPolicy kSleep{0, 0};
constexpr WaitPolicy kAll{200, 20};

struct Word {
  alignas(64) std::atomic<uint32_t> step{0};
  std::atomic<uint32_t> sleepers{0};
  uint64_t payload = 0;
};

void Tell(Word& word, uint32_t step, Ordered ordered) {
  const auto publish = ordered == Ordered::kBySleeper ? Publish : tvm_ipc::PublishOrdered;
  publish(word.step, step, word.sleepers);
}

struct Pair {
  Word one, two;
  std::atomic<uint32_t> abort{0};
};

/*!
 * \brief Two threads answer each other. A wake-up that gets lost costs the 20 ms until the sleeper
 *        looks again; a few may also be late because the machine is busy. Who never sleeps on a
 *        busy machine loses whole turns of the scheduler, which says nothing.
 */
int PingPong(const char* name, const WaitPolicy& policy, int rounds, uint32_t start,
             Ordered ordered) {
  Pair pair;
  pair.one.step = pair.two.step = start;
  std::atomic<int> slow{0};
  auto play = [&](Word& mine, Word& theirs, bool serves) {
    for (int i = 1; i <= rounds; ++i) {
      const uint32_t step = start + static_cast<uint32_t>(i);
      if (serves) {
        mine.payload = step * 3ull;
        Tell(mine, step, ordered);
      }
      const auto before = Clock::now();
      EXPECT(WaitFor(theirs.step, step, theirs.sleepers, pair.abort, policy,
                     std::chrono::seconds(60), ordered) == WaitResult::kReached);
      if (Clock::now() - before > milliseconds(19)) ++slow;
      EXPECT(theirs.payload == step * 3ull, "the step was seen before what it announces");
      if (!serves) {
        mine.payload = step * 3ull;
        Tell(mine, step, ordered);
      }
    }
  };
  const auto before = Clock::now();
  std::thread other([&] { play(pair.two, pair.one, false); });
  play(pair.one, pair.two, true);
  other.join();
  const std::chrono::duration<double, std::micro> spent = Clock::now() - before;
  std::printf("%s: %.1f us a round, %d of %d waits took a sleeper's whole slice\n", name,
              spent.count() / rounds, slow.load(), 2 * rounds);
  EXPECT(pair.one.sleepers == 0 && pair.two.sleepers == 0);
  return slow;
}

void TestPingPong(const char* name, const WaitPolicy& policy, int rounds, uint32_t start,
                  Ordered ordered = Ordered::kBySleeper) {
  const bool sleeps = policy.spins != kSpin.spins && policy.yields != kYield.yields;
  int fewest = PingPong(name, policy, rounds, start, ordered);
  for (int attempt = 1; attempt < 3 && sleeps && fewest >= rounds / 2; ++attempt) {
    fewest = std::min(fewest, PingPong(name, policy, rounds, start, ordered));
  }
  EXPECT(!sleeps || fewest < rounds / 2, "wake-ups get lost");
}

/*! \brief One step wakes all who sleep on it: on 20 steps, returns how many waits took a slice. */
int WakeMany() {
  Word word;
  std::atomic<int> slow{0};
  std::atomic<uint32_t> abort{0};
  std::atomic<int> woken{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (uint32_t step = 1; step <= 20; ++step) {
        const auto before = Clock::now();
        EXPECT(WaitFor(word.step, step, word.sleepers, abort, kSleep, std::chrono::seconds(60)) ==
               WaitResult::kReached);
        if (Clock::now() - before > milliseconds(19)) ++slow;
        EXPECT(word.payload >= step);
        ++woken;
        while (woken < static_cast<int>(8 * step)) std::this_thread::yield();
      }
    });
  }
  for (uint32_t step = 1; step <= 20; ++step) {
    while (woken < static_cast<int>(8 * (step - 1))) std::this_thread::yield();
    std::this_thread::sleep_for(milliseconds(step % 4));
    word.payload = step;
    Publish(word.step, step, word.sleepers);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(word.sleepers == 0);
  return slow;
}

/*! \brief On a busy machine many may be late now and then, but not again and again. */
void TestManySleepers() {
  int fewest = 8 * 20;
  for (int attempt = 0; attempt < 5 && fewest > 40; ++attempt) {
    fewest = std::min(fewest, WakeMany());
  }
  EXPECT(fewest <= 40, fewest, " of 160 sleepers are not woken");
}

void TestDeadline() {
  Word word;
  std::atomic<uint32_t> abort{0};
  for (const WaitPolicy& policy : {kSleep, kAll}) {
    const auto before = Clock::now();
    EXPECT(WaitFor(word.step, 1, word.sleepers, abort, policy, milliseconds(70)) ==
           WaitResult::kDeadline);
    const auto spent = Clock::now() - before;
    EXPECT(spent >= milliseconds(70), "gave up too early");
    EXPECT(spent < std::chrono::seconds(5), "gave up too late");
  }
  EXPECT(word.sleepers == 0);
}

/*! \brief Another thread's abort ends the wait in every phase but the spins, and in time there. */
void TestAbort() {
  for (const WaitPolicy& policy : {kSleep, kAll, kYield}) {
    Word word;
    std::atomic<uint32_t> abort{0};
    std::thread other([&] {
      std::this_thread::sleep_for(milliseconds(30));
      abort.store(1, std::memory_order_release);
    });
    EXPECT(WaitFor(word.step, 1, word.sleepers, abort, policy, std::chrono::seconds(60)) ==
           WaitResult::kAborted);
    other.join();
    // What was completed counts as completed, abort or not.
    Publish(word.step, 1, word.sleepers);
    EXPECT(WaitFor(word.step, 1, word.sleepers, abort, policy, std::chrono::seconds(60)) ==
           WaitResult::kReached);
    EXPECT(word.sleepers == 0);
  }
}

/*! \brief Who completes a step and aborts right after it has completed it. */
void TestAbortAfterStep() {
  constexpr uint32_t kRounds = 20000;
  Word word;
  std::atomic<uint32_t> abort{0};
  std::atomic<uint32_t> begun{0};
  std::thread other([&] {
    for (uint32_t round = 1; round <= kRounds; ++round) {
      while (begun.load() != round) std::this_thread::yield();
      for (uint32_t i = 0; i < round % 64; ++i) (void)begun.load();  // now sooner, now later
      Publish(word.step, round, word.sleepers);
      abort.store(1, std::memory_order_release);
    }
  });
  for (uint32_t round = 1; round <= kRounds; ++round) {
    abort.store(0);
    begun.store(round);
    EXPECT(WaitFor(word.step, round, word.sleepers, abort, round % 2 ? kYield : kSleep,
                   std::chrono::seconds(60)) == WaitResult::kReached);
    while (abort.load() == 0) std::this_thread::yield();
  }
  other.join();
}

void TestSteps() {
  EXPECT(tvm_ipc::Reached(5, 5) && tvm_ipc::Reached(6, 5) && !tvm_ipc::Reached(4, 5));
  EXPECT(tvm_ipc::Reached(0, 0xffffffffu) && !tvm_ipc::Reached(0xffffffffu, 0));
  EXPECT(tvm_ipc::Reached(0x80000000u, 0x7fffffffu));
}

void TestPolicy() {
  const int cores = tvm_ipc::AvailableCores();
  EXPECT(cores >= 1);
  const WaitPolicy alone = tvm_ipc::ChooseWaitPolicy(2, 2);
  const WaitPolicy crowded = tvm_ipc::ChooseWaitPolicy(3, 2);
  EXPECT(crowded.spins < alone.spins, "with fewer cores than ranks spinning keeps a peer waiting");
  EXPECT(crowded.yields > 0);
}

/*!
 * \brief A process that was stopped for longer than its deadline gives peers the time that was
 * left.
 */
void TestStopped() {
  void* shared =
      mmap(nullptr, sizeof(Pair), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT(shared != MAP_FAILED);
  auto* pair = new (shared) Pair;
  const pid_t child = fork();
  if (child == 0) {
    const WaitResult result =
        WaitFor(pair->one.step, 1, pair->one.sleepers, pair->abort, kSleep, milliseconds(3000));
    _exit(result == WaitResult::kReached ? 0 : 1);
  }
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT(kill(child, SIGSTOP) == 0);
  std::this_thread::sleep_for(milliseconds(4000));
  EXPECT(kill(child, SIGCONT) == 0);
  std::this_thread::sleep_for(milliseconds(500));
  Tell(pair->one, 1, Ordered::kBySleeper);
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child && status == 0, "it did not wait any longer");
  munmap(shared, sizeof(Pair));
}

}  // namespace

int main() {
  TestStopped();  // it forks, and there is no other thread yet
  TestSteps();
  TestPolicy();
  TestDeadline();
  TestAbort();
  TestAbortAfterStep();
  TestPingPong("spin", kSpin, tvm_ipc::AvailableCores() > 1 ? 300 : 3, 7);
  TestPingPong("yield", kYield, 2000, 0);
  TestPingPong("sleep", kSleep, 2000, 0);
  TestPingPong("sleep, the publisher orders", kSleep, 2000, 0, Ordered::kByPublisher);
  TestPingPong("all, steps wrap", kAll, 2000, 0u - 1000);
  TestManySleepers();
  std::printf("passed\n");
  return 0;
}
