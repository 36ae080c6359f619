/* SPDX-License-Identifier: Apache-2.0 */
/*! \file atfork_descriptors.cc */
#include "core/atfork_descriptors.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>

namespace tvm_ipc {

namespace {

struct Kept {
  std::mutex mutex;  // held during a fork, so that the child's copy of the set is consistent
  std::set<int> descriptors;
  std::atomic<uint32_t> generation{0};
};

Kept& TheKept();

void Hold() { TheKept().mutex.lock(); }
void Release() { TheKept().mutex.unlock(); }

void Replace() {
  Kept& kept = TheKept();
  kept.generation.fetch_add(1, std::memory_order_relaxed);
  int nowhere = -1;
  for (int descriptor : kept.descriptors) {
    close(descriptor);  // first, in case the table of descriptors is full
    if (nowhere < 0) {
      nowhere = open("/dev/null", O_RDWR | O_CLOEXEC);
      // open returns the lowest free number, which often is the one that was just freed.
      if (nowhere == descriptor) nowhere = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    }
    if (nowhere >= 0) dup3(nowhere, descriptor, O_CLOEXEC);
  }
  if (nowhere >= 0) close(nowhere);
  kept.descriptors.clear();
  kept.mutex.unlock();
}

Kept& TheKept() {
  // Never destroyed: a thread may fork while the process ends.
  static Kept* kept = [] {
    pthread_atfork(Hold, Release, Replace);
    return new Kept();
  }();
  return *kept;
}

}  // namespace

void KeepFromChildren(int descriptor) {
  if (descriptor < 0) return;
  std::lock_guard<std::mutex> lock(TheKept().mutex);
  TheKept().descriptors.insert(descriptor);
}

void CloseKept(int descriptor) {
  if (descriptor < 0) return;
  std::lock_guard<std::mutex> lock(TheKept().mutex);
  TheKept().descriptors.erase(descriptor);
  close(descriptor);
}

uint32_t Generation() { return TheKept().generation.load(std::memory_order_relaxed); }

}  // namespace tvm_ipc
