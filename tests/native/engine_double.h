/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file engine_double.h
 * \brief A double of the engine between nodes: a thread for each node of a cluster in one process,
 *        which moves messages between the nodes' memory as MPI would.
 *
 * Messages of one tag arrive in order, others in any. Some are copied when they are sent, others
 * when they arrive; each takes as long as it likes. A message that does not fit is a failed test.
 */
#ifndef TVM_IPC_TESTS_ENGINE_DOUBLE_H_
#define TVM_IPC_TESTS_ENGINE_DOUBLE_H_

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "core/engine_wire.h"
#include "expect.h"

namespace tvm_ipc {

class EngineDouble {
 public:
  /*! \param most Microseconds that a message may take, more or less. */
  EngineDouble(std::vector<std::shared_ptr<Segments>> nodes, uint64_t seed, int most = 100)
      : most_(most) {
    for (size_t node = 0; node < nodes.size(); ++node) {
      wires_.push_back(std::make_unique<EngineWire>(std::move(nodes[node])));
    }
    for (size_t node = 0; node < nodes.size(); ++node) {
      threads_.emplace_back([this, node, seed] { Run(static_cast<int>(node), seed + node); });
    }
  }
  ~EngineDouble() {
    stop_ = true;
    for (auto& wire : wires_) wire->Ring();
    for (std::thread& thread : threads_) thread.join();
  }

  /*! \brief From now on a node takes nothing; -1: all do again. */
  void Hold(int node) { held_ = node; }
  uint64_t messages() const { return messages_; }
  uint64_t bytes() const { return bytes_; }

 private:
  using Clock = std::chrono::steady_clock;

  struct Message {
    WireWork work;
    bool copied = false;
    std::vector<uint8_t> copy;
    Clock::time_point ready;
  };
  /*! \brief From a node to another one, with a tag. */
  using Way = std::tuple<int, int, int32_t>;
  struct Both {
    std::deque<Message> sent;
    std::deque<WireWork> wanted;
  };

  void Run(int node, uint64_t seed) {
    EngineWire& wire = *wires_[node];
    std::minstd_rand random(static_cast<uint32_t>(seed * 7919 + 1));
    std::vector<WireWork> works(64);
    while (!stop_) {
      if (wire.generation() != wire.flushed()) Forget(node, wire.generation());
      if (held_ == node) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      const size_t count = wire.Take(works.data(), 1 + random() % works.size());
      bool idle = false;
      if (std::lock_guard<std::mutex> lock(mutex_); true) {
        for (size_t i = 0; i < count; ++i) Add(node, works[i], random);
        idle = !Deliver(node) && count == 0;
      }
      // Who only looks leaves the lock to others, and the processor.
      if (idle) wire.Sleep(std::chrono::microseconds(50 + random() % 100));
    }
  }

  void Add(int node, const WireWork& work, std::minstd_rand& random) {
    if (!work.sends) return ways_[{work.peer, node, work.tag}].wanted.push_back(work);
    Message message{work, random() % 2 == 0, {}, Clock::now()};
    if (random() % 4 == 0) message.ready += std::chrono::microseconds(random() % (most_ + 1));
    const auto* from = reinterpret_cast<const uint8_t*>(work.address);
    if (message.copied) {
      message.copy.assign(from, from + work.bytes);
      wires_[node]->Done(work.rank, work.request, work.bytes);
    }
    ways_[{node, work.peer, work.tag}].sent.push_back(std::move(message));
  }

  /*! \brief Everything that has come for a node. */
  bool Deliver(int node) {
    bool any = false;
    for (auto it = ways_.begin(); it != ways_.end();) {
      Both& both = it->second;
      if (std::get<1>(it->first) != node) {
        ++it;
        continue;
      }
      while (!both.sent.empty() && !both.wanted.empty()) {
        Message& message = both.sent.front();
        const WireWork& wanted = both.wanted.front();
        if (message.work.generation != wanted.generation || Clock::now() < message.ready) break;
        EXPECT(message.work.bytes <= wanted.bytes, "a message of ", message.work.bytes, " bytes");
        if (message.work.bytes != 0) {
          memcpy(reinterpret_cast<void*>(wanted.address),
                 message.copied ? message.copy.data()
                                : reinterpret_cast<const void*>(message.work.address),
                 message.work.bytes);
        }
        if (!message.copied) {
          wires_[std::get<0>(it->first)]->Done(message.work.rank, message.work.request,
                                               message.work.bytes);
        }
        wires_[node]->Done(wanted.rank, wanted.request, message.work.bytes);
        any = true;
        ++messages_;
        bytes_ += message.work.bytes;
        both.sent.pop_front();
        both.wanted.pop_front();
      }
      it = both.sent.empty() && both.wanted.empty() ? ways_.erase(it) : std::next(it);
    }
    return any;
  }

  /*! \brief Nothing of older generations leaves a node, or arrives there, any more. */
  void Forget(int node, uint32_t generation) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [way, both] : ways_) {
      const bool from = std::get<0>(way) == node, to = std::get<1>(way) == node;
      auto drop = [&](auto& all, auto old) {
        for (auto it = all.begin(); it != all.end();) it = old(*it) ? all.erase(it) : it + 1;
      };
      if (from || to) {
        drop(both.sent, [&](const Message& one) { return one.work.generation < generation; });
      }
      if (to) drop(both.wanted, [&](const WireWork& one) { return one.generation < generation; });
    }
    wires_[node]->Flushed(generation);
  }

  const int most_;
  std::vector<std::unique_ptr<EngineWire>> wires_;
  std::mutex mutex_;
  std::map<Way, Both> ways_;
  std::atomic<bool> stop_{false};
  std::atomic<int> held_{-1};
  std::atomic<uint64_t> messages_{0}, bytes_{0};
  std::vector<std::thread> threads_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_ENGINE_DOUBLE_H_
