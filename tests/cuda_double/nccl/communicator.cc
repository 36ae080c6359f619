/* SPDX-License-Identifier: Apache-2.0 */
/*! \file communicator.cc */
#include "communicator.h"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <memory>

namespace nccl_double {

namespace {

/*! \brief Bytes on their way to or from another member. */
struct Transfer {
  const unsigned char* from;
  unsigned char* to;
  size_t bytes;
  size_t done = 0;
};

/*! \brief All that a member sends and receives in a job; each pair in order, the pairs at once. */
class Transfers {
 public:
  explicit Transfers(ncclComm* communicator)
      : communicator_(communicator),
        sent_(static_cast<size_t>(communicator->size)),
        received_(static_cast<size_t>(communicator->size)) {}

  void Send(const unsigned char* from, size_t bytes, int to) {
    if (bytes > 0) sent_[static_cast<size_t>(to)].push_back({from, nullptr, bytes});
  }
  void Receive(unsigned char* to, size_t bytes, int from) {
    if (bytes > 0) received_[static_cast<size_t>(from)].push_back({nullptr, to, bytes});
  }

  /*! \brief False if that was aborted. */
  bool Finish() {
    while (true) {
      if (communicator_->abort) return false;
      bool left = false;
      bool moved = false;
      for (int peer = 0; peer < communicator_->size; ++peer) {
        auto& sent = sent_[static_cast<size_t>(peer)];
        auto& received = received_[static_cast<size_t>(peer)];
        if (!sent.empty()) moved = Push(peer, sent) || moved;
        if (!received.empty()) moved = Pull(peer, received) || moved;
        left = left || !sent.empty() || !received.empty();
      }
      if (!left) return true;
      if (!moved) sched_yield();
    }
  }

 private:
  bool Push(int peer, std::deque<Transfer>& sent) {
    Channel& mail = communicator_->mail(communicator_->rank, peer);
    const uint64_t number = mail.written.load();
    if (number - mail.taken.load() == 2) return false;
    Transfer& first = sent.front();
    const size_t bytes = std::min(kChunkBytes, first.bytes - first.done);
    memcpy(mail.chunk[number & 1], first.from + first.done, bytes);
    mail.bytes[number & 1] = bytes;
    mail.written.store(number + 1);
    first.done += bytes;
    if (first.done == first.bytes) sent.pop_front();
    return true;
  }

  bool Pull(int peer, std::deque<Transfer>& received) {
    Channel& mail = communicator_->mail(peer, communicator_->rank);
    const uint64_t number = mail.taken.load();
    if (mail.written.load() == number) return false;
    Transfer& first = received.front();
    const size_t bytes = mail.bytes[number & 1];
    if (bytes > first.bytes - first.done) {
      // NCCL would write beyond the buffer, or wait for ever.
      std::fprintf(stderr, "the double of NCCL: member %d gets more bytes than it has room for\n",
                   communicator_->rank);
      std::abort();
    }
    memcpy(first.to + first.done, mail.chunk[number & 1], bytes);
    mail.taken.store(number + 1);
    first.done += bytes;
    if (first.done == first.bytes) received.pop_front();
    return true;
  }

  ncclComm* communicator_;
  std::vector<std::deque<Transfer>> sent_;
  std::vector<std::deque<Transfer>> received_;
};

/*! \brief A reduction once all sources are there. */
struct Pending {
  const Operation* operation;
  std::vector<const unsigned char*> sources;
  std::vector<std::unique_ptr<unsigned char[]>> memory;
  size_t count;
};

/*! \brief Receive from all others what `own` is here, to be reduced. */
Pending Collect(Transfers& transfers, const ncclComm& communicator, const Operation& operation,
                const unsigned char* own, size_t count) {
  Pending pending{&operation, {}, {}, count};
  const size_t bytes = count * WidthOf(operation.type);
  for (int peer = 0; peer < communicator.size; ++peer) {
    if (peer == communicator.rank) {
      pending.sources.push_back(own);
      continue;
    }
    pending.memory.push_back(std::make_unique<unsigned char[]>(bytes));
    pending.sources.push_back(pending.memory.back().get());
    transfers.Receive(pending.memory.back().get(), bytes, peer);
  }
  return pending;
}

void Copy(unsigned char* to, const unsigned char* from, size_t bytes) {
  if (to != from) memmove(to, from, bytes);
}

}  // namespace

bool Join(ncclComm* communicator) {
  const int file = open(communicator->file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  const size_t bytes = Shared::Bytes(communicator->size);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return false;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return false;
  auto* shared = static_cast<Shared*>(memory);
  communicator->shared = shared;
  shared->device[communicator->rank].store(communicator->device + 1);
  shared->arrived.fetch_add(1);
  while (shared->arrived.load() < communicator->size && !communicator->abort) usleep(200);
  unlink(communicator->file.c_str());  // also where a member died before it came
  return !communicator->abort;
}

void RemoveFilesOfTheDead() {
  DIR* const folder = opendir(kFolder);
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) {
    int pid = 0;
    if (sscanf(entry->d_name, "nccl_double.%d.", &pid) != 1) continue;
    if (kill(pid, 0) == 0 || errno != ESRCH) continue;
    unlink((std::string(kFolder) + "/" + entry->d_name).c_str());
  }
  closedir(folder);
}

void Run(const Job& job) {
  ncclComm& communicator = *job.communicator;
  const int me = communicator.rank;
  // What was launched before it ended ends soon after.
  constexpr int64_t kSoon = 2;
  if (communicator.ended && job.captured && time(nullptr) - communicator.ended_at > kSoon) {
    std::fprintf(stderr, "the double of NCCL: a graph runs operations of what was destroyed\n");
    std::abort();
  }
  communicator.running.fetch_add(1);
  Transfers transfers(&communicator);
  std::vector<Pending> pending;
  for (const Operation& operation : job.operations) {
    const size_t bytes = operation.count * WidthOf(operation.type);
    auto to_all = [&](auto part) {
      for (int peer = 0; peer < communicator.size; ++peer) {
        if (peer != me) transfers.Send(part(peer), bytes, peer);
      }
    };
    switch (operation.kind) {
      case Kind::kAllReduce:
        to_all([&](int) { return operation.send; });
        pending.push_back(
            Collect(transfers, communicator, operation, operation.send, operation.count));
        break;
      case Kind::kReduceScatter: {
        auto part = [&](int peer) { return operation.send + static_cast<size_t>(peer) * bytes; };
        to_all(part);
        pending.push_back(Collect(transfers, communicator, operation, part(me), operation.count));
        break;
      }
      case Kind::kReduce:
        if (me != operation.other) {
          transfers.Send(operation.send, bytes, operation.other);
        } else {
          pending.push_back(
              Collect(transfers, communicator, operation, operation.send, operation.count));
        }
        break;
      case Kind::kAllGather:
        to_all([&](int) { return operation.send; });
        Copy(operation.recv + static_cast<size_t>(me) * bytes, operation.send, bytes);
        for (int peer = 0; peer < communicator.size; ++peer) {
          if (peer == me) continue;
          transfers.Receive(operation.recv + static_cast<size_t>(peer) * bytes, bytes, peer);
        }
        break;
      case Kind::kBroadcast:
        if (me == operation.other) {
          to_all([&](int) { return operation.send; });
          Copy(operation.recv, operation.send, bytes);
        } else {
          transfers.Receive(operation.recv, bytes, operation.other);
        }
        break;
      case Kind::kSend:
        transfers.Send(operation.send, bytes, operation.other);
        break;
      case Kind::kReceive:
        transfers.Receive(operation.recv, bytes, operation.other);
        break;
    }
  }
  if (!communicator.ended && transfers.Finish()) {
    for (const Pending& one : pending) {
      Reduce(one.operation->type, one.operation->how, one.sources, one.count, one.operation->recv);
    }
  }
  communicator.running.fetch_sub(1);
}

}  // namespace nccl_double
