/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_arena.cc
 * \brief The arena against a reference that knows every byte; its limits, and its threads.
 */
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "core/arena_allocator.h"
#include "expect.h"

namespace {

using tvm_ipc::Arena;
using tvm_ipc::ArenaStats;
using Random = std::mt19937_64;

/*! \brief What the system would know: which bytes have pages. */
struct System {
  std::map<size_t, size_t> committed;  // begin -> end
  size_t refuse_from = SIZE_MAX;
  int commits = 0;

  bool Commit(size_t offset, size_t bytes) {
    ++commits;
    if (offset + bytes > refuse_from) return false;
    EXPECT(bytes > 0);
    EXPECT(offset == end(), "pages at ", offset, ", the last are at ", end());
    committed[offset] = offset + bytes;
    return true;
  }
  void Release(size_t offset, size_t bytes) {
    EXPECT(offset + bytes == end(), "released in the middle");
    while (!committed.empty() && committed.rbegin()->first >= offset) {
      committed.erase(std::prev(committed.end()));
    }
    if (!committed.empty()) committed.rbegin()->second = std::min(offset, end());
  }
  size_t end() const { return committed.empty() ? 0 : committed.rbegin()->second; }
};

Arena MakeArena(size_t limit, System* system) {
  return Arena(
      limit, [system](size_t offset, size_t bytes) { return system->Commit(offset, bytes); },
      [system](size_t offset, size_t bytes) { system->Release(offset, bytes); });
}

size_t DrawBytes(Random& random) {
  switch (random() % 8) {
    case 0:
      return random() % (3 << 20);
    case 1:
      return random() % (300 << 10);
    case 2:
      return 0;
    default:
      return random() % 20000;
  }
}

size_t Rounded(size_t bytes) {
  const size_t unit = Arena::kAlignment;
  return std::max(unit, (bytes + unit - 1) / unit * unit);
}

/*! \brief Blocks never overlap, lie on pages, are aligned; free neighbours join; sums are right. */
void TestAgainstReference(uint64_t seed) {
  Random random(seed);
  constexpr size_t kLimit = 64 << 20;
  System system;
  Arena arena = MakeArena(kLimit, &system);
  std::map<size_t, size_t> live;  // offset -> bytes asked for
  size_t in_use = 0;
  int refused = 0;
  for (int i = 0; i < 6000; ++i) {
    if (random() % 97 == 0) arena.Trim();
    if (live.empty() || random() % 100 < 52) {
      const size_t bytes = DrawBytes(random);
      size_t offset;
      try {
        offset = arena.Allocate(bytes);
      } catch (const tvm_ipc::Error& error) {
        EXPECT(error.kind() == std::string(tvm_ipc::kind::kMemory));
        EXPECT(arena.stats().largest_free < Rounded(bytes), "a free block was there");
        EXPECT(in_use + Rounded(bytes) > kLimit / 2, "fragments of less than half in use");
        ++refused;
        continue;
      }
      EXPECT(offset % Arena::kAlignment == 0);
      EXPECT(offset + Rounded(bytes) <= system.end(), "handed out before it was committed");
      auto next = live.lower_bound(offset);
      EXPECT(next == live.end() || offset + Rounded(bytes) <= next->first, "overlaps the next");
      if (next != live.begin()) {
        auto previous = std::prev(next);
        EXPECT(previous->first + Rounded(previous->second) <= offset, "overlaps the one before");
      }
      live[offset] = bytes;
      in_use += Rounded(bytes);
    } else {
      auto victim = std::next(live.begin(), static_cast<int64_t>(random() % live.size()));
      arena.Free(victim->first, victim->second);
      in_use -= Rounded(victim->second);
      live.erase(victim);
    }
    const ArenaStats stats = arena.stats();
    EXPECT(stats.in_use == in_use);
    EXPECT(stats.committed == system.end());
    EXPECT(stats.committed <= kLimit);
    EXPECT(stats.peak_in_use >= in_use);
  }
  for (const auto& [offset, bytes] : live) arena.Free(offset, bytes);
  ArenaStats stats = arena.stats();
  EXPECT(stats.in_use == 0);
  EXPECT(stats.largest_free == stats.committed, "free neighbours were not joined");
  arena.Trim();
  stats = arena.stats();
  EXPECT(stats.committed == 0 && system.end() == 0 && stats.largest_free == 0);
  EXPECT(refused < 6000 / 2);
}

/*! \brief The same calls give the same offsets: what the symmetric arena is built on. */
void TestSameCallsSameOffsets() {
  System one, two;
  Arena first = MakeArena(256 << 20, &one);
  Arena second = MakeArena(256 << 20, &two);
  for (Arena* arena : {&first, &second}) {
    Random random(5);
    static std::vector<size_t> seen;
    std::vector<size_t> offsets;
    std::vector<std::pair<size_t, size_t>> live;
    for (int i = 0; i < 3000; ++i) {
      if (live.empty() || random() % 5 < 3) {
        const size_t bytes = random() % 50000;
        offsets.push_back(arena->Allocate(bytes));
        live.emplace_back(offsets.back(), bytes);
      } else {
        std::swap(live[random() % live.size()], live.back());
        arena->Free(live.back().first, live.back().second);
        live.pop_back();
      }
    }
    if (arena == &first) seen = offsets;
    EXPECT(offsets == seen, "the same calls gave different offsets");
  }
}

/*! \brief Freed blocks are used again: nothing grows in a steady state, however long. */
void TestSteadyState() {
  System system;
  Arena arena = MakeArena(1 << 30, &system);
  Random random(9);
  std::vector<size_t> sizes;
  for (int i = 0; i < 40; ++i) sizes.push_back(1 + random() % (1 << 20));
  std::vector<size_t> offsets(sizes.size());
  uint64_t growths = 0;
  for (int round = 0; round < 200; ++round) {
    if (round == 2) growths = arena.stats().growths;
    for (size_t i = 0; i < sizes.size(); ++i) offsets[i] = arena.Allocate(sizes[i]);
    for (size_t i = 0; i < sizes.size(); ++i) arena.Free(offsets[i], sizes[i]);
  }
  const ArenaStats stats = arena.stats();
  EXPECT(stats.growths == growths, "grew in a steady state");
  EXPECT(stats.committed < 2 * stats.peak_in_use, stats.committed, " for ", stats.peak_in_use);

  constexpr int kCalls = 200000;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) arena.Free(arena.Allocate(4096), 4096);
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
  std::printf("allocate and free: %.0f ns\n", spent.count() / kCalls);
}

/*! \brief Mixed lifetimes leave holes, but not many times what is in use. */
void TestFragmentation() {
  System system;
  Arena arena = MakeArena(size_t{4} << 30, &system);
  Random random(11);
  std::deque<std::pair<size_t, size_t>> live;
  size_t in_use = 0;
  for (int i = 0; i < 50000; ++i) {
    const size_t bytes = DrawBytes(random);
    live.emplace_back(arena.Allocate(bytes), bytes);
    in_use += bytes;
    while (in_use > (100 << 20)) {
      const size_t victim = random() % live.size();
      std::swap(live[victim], live.front());
      arena.Free(live.front().first, live.front().second);
      in_use -= live.front().second;
      live.pop_front();
    }
  }
  const ArenaStats stats = arena.stats();
  const double ratio = static_cast<double>(stats.committed) / stats.peak_in_use;
  std::printf("committed / peak in use after 50000 random blocks: %.2f\n", ratio);
  EXPECT(ratio < 1.8, "fragmentation ", ratio);
}

void TestLimits() {
  constexpr size_t kLimit = (5 << 20) + 4096;
  System system;
  Arena arena = MakeArena(kLimit + 17, &system);
  const tvm_ipc::Error too_large = ErrorOf([&] { arena.Allocate(kLimit + 257); });
  EXPECT(too_large.kind() == std::string(tvm_ipc::kind::kMemory));
  EXPECT(Contains(too_large.what(), "arena_limit"), too_large.what());
  ErrorOf([&] { arena.Allocate(SIZE_MAX); });
  EXPECT(system.commits == 0);
  const size_t all = arena.Allocate(kLimit);
  EXPECT(all == 0);
  const tvm_ipc::Error full = ErrorOf([&] { arena.Allocate(1); });
  EXPECT(Contains(full.what(), "largest free block 0"), full.what());
  arena.Free(all, kLimit);
  EXPECT(arena.Allocate(100) == 0, "not usable after it was full");
}

/*! \brief The system may have less memory than the limit allows. */
void TestSystemWithoutPages() {
  System system;
  system.refuse_from = (3 << 20);
  Arena arena = MakeArena(1 << 30, &system);
  const size_t first = arena.Allocate(1 << 20);  // 2 MiB are committed
  // 2 MiB more are refused, what is needed fits.
  const size_t second = arena.Allocate((3 << 20) - (1 << 20));
  EXPECT(second == (1 << 20));
  const ArenaStats before = arena.stats();
  const tvm_ipc::Error error = ErrorOf([&] { arena.Allocate(1); });
  EXPECT(Contains(error.what(), "no more pages"), error.what());
  EXPECT(arena.stats().in_use == before.in_use && arena.stats().committed == before.committed);
  arena.Free(first, 1 << 20);
  EXPECT(arena.Allocate(512) == 0);
}

/*! \brief A tensor may end on another thread than the worker's. */
void TestFreeOnAnotherThread() {
  System system;
  Arena arena = MakeArena(256 << 20, &system);
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<size_t, size_t>> queue;
  bool done = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      std::unique_lock<std::mutex> lock(mutex);
      while (true) {
        changed.wait(lock, [&] { return done || !queue.empty(); });
        if (queue.empty()) return;
        const auto [offset, bytes] = queue.front();
        queue.pop_front();
        changed.notify_all();
        lock.unlock();
        arena.Free(offset, bytes);
        lock.lock();
      }
    });
  }
  Random random(3);
  for (int i = 0; i < 20000; ++i) {
    const size_t bytes = random() % 100000;
    const size_t offset = arena.Allocate(bytes);
    if (i % 100 == 0) arena.Trim();
    std::unique_lock<std::mutex> lock(mutex);
    queue.emplace_back(offset, bytes);
    changed.notify_all();
    changed.wait(lock, [&] { return queue.size() < 500; });
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
  }
  changed.notify_all();
  for (std::thread& thread : threads) thread.join();
  EXPECT(arena.stats().in_use == 0);
  EXPECT(arena.stats().largest_free == arena.stats().committed);
}

}  // namespace

int main() {
  for (uint64_t seed = 1; seed <= 6; ++seed) TestAgainstReference(seed);
  TestSameCallsSameOffsets();
  TestSteadyState();
  TestFragmentation();
  TestLimits();
  TestSystemWithoutPages();
  TestFreeOnAnotherThread();
  std::printf("passed\n");
  return 0;
}
