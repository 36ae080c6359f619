/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_thread_pool.cc
 * \brief Each task of a launch runs once, before the launch returns: with awake and sleeping
 *        helpers, several callers, tasks that launch, that wait for each other, that throw or are
 *        late, and in forked children.
 */
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/thread_pool.h"
#include "expect.h"

namespace {

using tvm_ipc::ThreadPool;
using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

/*! \brief Call `body(task)` for each task, as `ThreadPool::Run` does. */
template <typename Body>
void Run(int threads, int tasks, Body body) {
  ThreadPool::OfThread().Run(
      threads, tasks, [](int task, void* data) { (*static_cast<Body*>(data))(task); }, &body);
}

template <typename Body>
bool TryRun(int threads, int tasks, Body body) {
  return ThreadPool::OfThread().TryRun(
      threads, tasks, [](int task, void* data) { (*static_cast<Body*>(data))(task); }, &body);
}

/*! \brief Try until helpers are not left out. */
template <typename Body>
void RunWithHelpers(int threads, int tasks, Body body) {
  const Clock::time_point end = Clock::now() + std::chrono::seconds(60);
  while (!TryRun(threads, tasks, body)) {
    EXPECT(Clock::now() < end, "helpers are left out for a minute");
    std::this_thread::sleep_for(milliseconds(1));
  }
}

/*! \brief Launch with plain counters: a task that runs twice, late or not at all is found, and the
 *         thread sanitizer finds memory that is not ordered. */
void RunOnce(int threads, int tasks) {
  std::vector<int> count(tasks);
  Run(threads, tasks, [&](int task) { ++count[task]; });
  for (int task = 0; task < tasks; ++task) {
    EXPECT(count[task] == 1, "task ", task, " of ", tasks, " ran ", count[task], " times");
  }
}

void TestEachTaskRunsOnce() {
  for (int threads : {1, 2, 3, 8}) {
    for (int tasks : {1, 2, 3, 7, 64, 1000}) RunOnce(threads, tasks);
  }
  for (int round = 0; round < 3000; ++round) RunOnce(1 + round % 4, 1 + round % 5);
}

void TestHelpersWakeUp() {
  for (int round = 0; round < 30; ++round) {
    std::this_thread::sleep_for(milliseconds(round % 2 == 0 ? 12 : 1));  // they sleep, or yield
    RunOnce(4, 4);
  }
}

void TestCallersDoNotShareHelpers() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([] {
      for (int round = 0; round < 500; ++round) RunOnce(3, 5);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void TestTasksThatWaitForEachOther() {
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> arrived{0};
    RunWithHelpers(3, 3, [&](int) {
      ++arrived;
      while (arrived < 3) std::this_thread::yield();
    });
    EXPECT(arrived == 3, arrived.load());
  }
}

void TestLaunchesInTasks() {
  std::atomic<int> inner{0}, refused{0};
  RunWithHelpers(3, 6, [&](int) {
    refused += !TryRun(2, 2, [&](int) { ++inner; });
    Run(2, 2, [&](int) { ++inner; });
  });
  EXPECT(inner == 12 && refused == 6, "inner ", inner.load(), ", refused ", refused.load());
}

void TestTasksThatThrow() {
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> ran{0};
    bool threw = false;
    try {
      RunWithHelpers(3, 6, [&](int task) {
        ++ran;
        if (task % 2 == round % 2) throw std::runtime_error("odd");
      });
    } catch (const std::runtime_error& error) {
      threw = std::string(error.what()) == "odd";
    }
    EXPECT(threw && ran == 6, "threw ", threw, ", ran ", ran.load());
    RunOnce(3, 6);
  }
}

void TestLateHelpersAreLeftOut() {
  const std::thread::id caller = std::this_thread::get_id();
  bool left_out = false;
  for (int round = 0; round < 200 && !left_out; ++round) {
    std::atomic<bool> helped{false};
    const bool tried = TryRun(2, 2, [&](int) {
      if (std::this_thread::get_id() == caller) {
        const Clock::time_point end = Clock::now() + milliseconds(20);
        while (!helped && Clock::now() < end) std::this_thread::yield();
      } else {
        helped = true;
        std::this_thread::sleep_for(milliseconds(50));
      }
    });
    left_out = tried && helped && !TryRun(2, 2, [](int) {});
  }
  EXPECT(left_out, "a helper was late in each launch, and never left out");
  std::atomic<bool> helped{false};
  const Clock::time_point end = Clock::now() + std::chrono::seconds(60);
  while (!helped && Clock::now() < end) {
    Run(2, 2, [&](int) {
      if (std::this_thread::get_id() != caller) helped = true;
      std::this_thread::sleep_for(microseconds(100));
    });
  }
  EXPECT(helped, "a helper that was late once never helps again");
}

void TestForkedChildren() {
  RunOnce(3, 6);
  const pid_t child = fork();
  if (child == 0) {
    RunOnce(3, 6);
    std::_Exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status ", status);
  RunOnce(3, 6);
}

int64_t ThreadsHere() {
  std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

void TestHelpersEndWithTheirCaller() {
  const int64_t before = ThreadsHere();
  for (int round = 0; round < 300; ++round) {
    std::thread([] { RunWithHelpers(4, 4, [](int) {}); }).join();
  }
  const Clock::time_point end = Clock::now() + std::chrono::seconds(60);
  while (ThreadsHere() > before && Clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT(ThreadsHere() <= before, "threads: ", ThreadsHere(), ", before: ", before);
}

void TestThreadsAreNotBound() {
  cpu_set_t own;
  sched_getaffinity(0, sizeof(own), &own);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(milliseconds(round % 2 == 0 ? 12 : 0));
    std::atomic<int> different{0};
    RunWithHelpers(3, 6, [&](int) {
      cpu_set_t cores;
      sched_getaffinity(0, sizeof(cores), &cores);
      different += !CPU_EQUAL(&own, &cores);
    });
    EXPECT(different == 0, different.load(), " tasks ran on a thread with other cores");
  }
}

}  // namespace

int main() {
  TestEachTaskRunsOnce();
  TestHelpersWakeUp();
  TestCallersDoNotShareHelpers();
  TestTasksThatWaitForEachOther();
  TestLaunchesInTasks();
  TestTasksThatThrow();
  TestLateHelpersAreLeftOut();
  TestForkedChildren();
  TestHelpersEndWithTheirCaller();
  TestThreadsAreNotBound();
  std::printf("ok\n");
}
