/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file engine_double.h
 * \brief The engines of all nodes of a cluster in one process: a thread for each, with the
 * transport that is shipped, on a double of MPI that moves messages between the nodes' memory.
 *
 * Messages of one tag arrive in order, others in any. Some are copied when they are sent, others
 * when they arrive; each takes as long as it likes. A receive that has got its message, though not
 * all of it, cannot be taken back. A message that does not fit is a failed test, and so are more
 * messages at a time than may be of those that go in turn. Handles have 4 bytes, as those of one
 * MPI, or 8, as those of another.
 */
#ifndef TVM_IPC_TESTS_ENGINE_DOUBLE_H_
#define TVM_IPC_TESTS_ENGINE_DOUBLE_H_

#include <algorithm>
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
#include <utility>
#include <vector>

#include "core/internode_request_queue_engine_side.h"
#include "engine/in_flight_send_limit.h"
#include "engine/internode_progress_engine.h"
#include "engine/mpi_transport.h"
#include "expect.h"
#include "ranks.h"

namespace tvm_ipc {

/*! \brief MPI among nodes that are threads; a thread says which it is before it calls. */
class MpiDouble {
 public:
  MpiDouble(uint64_t seed, int most)
      : most_(most), small_(seed % 2 == 0), random_(seed * 7919 + 1) {
    functions_.Isend = [](const void* data, int count, engine::MpiHandle, int to, int tag,
                          engine::MpiHandle comm, void* request) {
      return here->Send(data, count, to, tag, static_cast<int>(comm), request);
    };
    functions_.Irecv = [](void* data, int room, engine::MpiHandle, int from, int tag,
                          engine::MpiHandle comm, void* request) {
      return here->Receive(data, room, from, tag, static_cast<int>(comm), request);
    };
    functions_.Testsome = [](int count, void* requests, int* ended, int* which, void* statuses) {
      return here->Test(count, requests, ended, which, statuses);
    };
    functions_.Testall = [](int count, void* requests, int* all, void*) {
      return here->TestAll(count, requests, all);
    };
    functions_.Cancel = [](void* request) { return here->Cancel(request); };
    functions_.Test_cancelled = [](const void* status, int* cancelled) {
      memcpy(cancelled, status, sizeof(int));
      return 0;
    };
    functions_.Get_count = [](const void* status, engine::MpiHandle, int* count) {
      memcpy(count, static_cast<const uint8_t*>(status) + sizeof(int), sizeof(int));
      return 0;
    };
    functions_.Improbe = [](int from, int, engine::MpiHandle comm, int* found, void* message,
                            void* status) {
      return here->Probe(from, static_cast<int>(comm), found, message, status);
    };
    functions_.Mrecv = [](void* data, int count, engine::MpiHandle, void* message, void*) {
      return here->ReceiveProbed(data, count, message);
    };
    functions_.Error_string = [](int, char*, int*) { return 1; };
  }

  const engine::MpiFunctions& functions() const { return functions_; }
  engine::MpiWorld World() const {
    return small_ ? engine::MpiWorld{0, 1, 0, -1, 4, 20} : engine::MpiWorld{0, 1, 0, -1, 8, 24};
  }
  void Enter(int node) {
    here = this;
    node_here = node;
  }
  /*! \brief Bytes of messages behind their descriptors, from a node to another one, until now. */
  std::map<std::pair<int, int>, size_t> TakeSent() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(sent_, {});
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Number = uint32_t;

  struct Request {
    uint8_t* data;
    int count, tag;
    bool done = false, cancelled = false;
  };
  struct Message {
    Number send;
    const uint8_t* data;
    int count, tag;
    std::vector<uint8_t> copy;
    bool copied;
    Clock::time_point ready;
    /*! \brief The receive that has it, though it may not be whole. */
    Number receive = 0;
  };
  /*! \brief From a node to another one, in a communicator. */
  using Way = std::tuple<int, int, int>;
  struct Both {
    std::deque<Message> sent;
    std::deque<Number> wanted;
  };

  Number Add(const Request& request, void* handle) {
    requests_[++last_] = request;
    Put(handle, last_);
    return last_;
  }
  void Put(void* handle, Number number) const {
    const uint64_t wide = number;
    memcpy(handle, small_ ? static_cast<const void*>(&number) : &wide, World().request_bytes);
  }
  static Number Get(const void* handle) {
    Number number;
    memcpy(&number, handle, sizeof(number));
    return number;
  }

  int Send(const void* data, int count, int to, int tag, int comm, void* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto* bytes = static_cast<const uint8_t*>(data);
    const bool copied = random_() % 2 == 0;
    if (comm == static_cast<int>(World().messages)) {
      sent_[{node_here, to}] += static_cast<size_t>(count) - kLine;
    }
    if (IsSequential(tag)) {
      const auto same = [&](const auto& one) {
        return one.second.tag == tag && one.second.data == nullptr;
      };
      EXPECT(std::count_if(requests_.begin(), requests_.end(), same) < engine::kAtATime,
             "messages that go in turn are sent at once");
    }
    const Number send = Add({nullptr, count, tag, copied, false}, handle);
    Message message{send, bytes, count, tag, {}, copied, Clock::now()};
    if (copied && count != 0) message.copy.assign(bytes, bytes + count);
    if (random_() % 4 == 0) message.ready += std::chrono::microseconds(random_() % (most_ + 1));
    ways_[{node_here, to, comm}].sent.push_back(std::move(message));
    return 0;
  }

  int Receive(void* data, int room, int from, int tag, int comm, void* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Number number = Add({static_cast<uint8_t*>(data), room, tag}, handle);
    ways_[{from, node_here, comm}].wanted.push_back(number);
    return 0;
  }

  int Cancel(void* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Number number = Get(handle);
    for (auto& [way, both] : ways_) {
      auto& wanted = both.wanted;
      auto found = std::find(wanted.begin(), wanted.end(), number);
      if (found == wanted.end()) continue;
      wanted.erase(found);
      Request& request = requests_.at(number);
      request.done = request.cancelled = true;
    }
    return 0;
  }

  int Test(int count, void* handles, int* ended, int* which, void* statuses) {
    std::lock_guard<std::mutex> lock(mutex_);
    Deliver();
    *ended = 0;
    for (int i = 0; i < count; ++i) {
      uint8_t* handle = static_cast<uint8_t*>(handles) + i * World().request_bytes;
      const auto found = requests_.find(Get(handle));
      if (found == requests_.end() || !found->second.done || random_() % 8 == 0) continue;
      const int status[] = {found->second.cancelled, found->second.count};
      memcpy(static_cast<uint8_t*>(statuses) + *ended * World().status_bytes, status,
             sizeof(status));
      which[(*ended)++] = i;
      requests_.erase(found);
      Put(handle, 0);
    }
    return 0;
  }

  int TestAll(int count, void* handles, int* all) {
    std::lock_guard<std::mutex> lock(mutex_);
    Deliver();
    *all = 1;
    for (int i = 0; i < count; ++i) {
      const auto found =
          requests_.find(Get(static_cast<uint8_t*>(handles) + i * World().request_bytes));
      EXPECT(found != requests_.end());
      if (!found->second.done) *all = 0;
    }
    return 0;
  }

  int Probe(int from, int comm, int* found, void* message, void* status) {
    std::lock_guard<std::mutex> lock(mutex_);
    Both& both = ways_[{from, node_here, comm}];
    EXPECT(both.wanted.empty(), "who drops messages has receives");
    *found = !both.sent.empty() && both.sent.front().ready <= Clock::now();
    if (*found == 0) return 0;
    const int says[] = {0, both.sent.front().count};
    memcpy(status, says, sizeof(says));
    probed_[++last_] = std::move(both.sent.front());
    both.sent.pop_front();
    Put(message, last_);
    return 0;
  }

  int ReceiveProbed(void* data, int count, void* message) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = probed_.find(Get(message));
    EXPECT(found != probed_.end() && found->second.count <= count);
    Copy(found->second, static_cast<uint8_t*>(data));
    probed_.erase(found);
    return 0;
  }

  void Copy(const Message& message, uint8_t* to) {
    if (message.count != 0) {
      memcpy(to, message.copied ? message.copy.data() : message.data,
             static_cast<size_t>(message.count));
    }
    if (!message.copied) requests_.at(message.send).done = true;
  }

  /*! \brief Everything that has come for this thread's node. */
  void Deliver() {
    for (auto& [way, both] : ways_) {
      if (std::get<1>(way) != node_here) continue;
      for (auto it = both.sent.begin(); it != both.sent.end();) {
        if (it->receive == 0) {
          const auto fits = [&](Number number) { return requests_.at(number).tag == it->tag; };
          const auto wanted = std::find_if(both.wanted.begin(), both.wanted.end(), fits);
          if (wanted != both.wanted.end()) {
            it->receive = *wanted;
            both.wanted.erase(wanted);
          }
        }
        if (it->receive == 0 || Clock::now() < it->ready) {
          ++it;
          continue;
        }
        Request& receive = requests_.at(it->receive);
        EXPECT(it->count <= receive.count, "a message of ", it->count, " bytes");
        Copy(*it, receive.data);
        receive.count = it->count;
        receive.done = true;
        it = both.sent.erase(it);
      }
    }
  }

  static inline thread_local MpiDouble* here = nullptr;
  static inline thread_local int node_here = 0;

  const int most_;
  const bool small_;
  engine::MpiFunctions functions_;
  std::mutex mutex_;
  std::minstd_rand random_;
  std::map<Way, Both> ways_;
  std::map<std::pair<int, int>, size_t> sent_;
  std::map<Number, Request> requests_;
  std::map<Number, Message> probed_;
  Number last_ = 0;
};

class EngineDouble {
 public:
  /*! \param most Microseconds that a message may take, more or less. */
  EngineDouble(std::vector<std::shared_ptr<Segments>> nodes, uint64_t seed, int most = 100)
      : mpi_(seed, most) {
    for (auto& segments : nodes) {
      rings_.push_back(std::make_unique<EngineRing>(std::move(segments)));
    }
    for (size_t node = 0; node < rings_.size(); ++node) {
      threads_.emplace_back([this, node] { Run(static_cast<int>(node)); });
    }
  }
  ~EngineDouble() {
    stopped_ = true;
    for (auto& ring : rings_) ring->WakeEngine();
    for (std::thread& thread : threads_) thread.join();
  }
  /*! \brief What has been sent since this was asked for. */
  std::map<std::pair<int, int>, size_t> TakeSent() { return mpi_.TakeSent(); }

 private:
  void Run(int node) {
    mpi_.Enter(node);
    try {
      EXPECT(rings_[node]->node() == node);
      engine::MpiTransport transport(mpi_.functions(), mpi_.World(), rings_[node]->nodes(), node);
      engine::Serve(*rings_[node], transport, stopped_);
    } catch (const Error& error) {
      Die(error.what());
    }
  }

  MpiDouble mpi_;
  std::vector<std::unique_ptr<EngineRing>> rings_;
  std::atomic<bool> stopped_{false};
  std::vector<std::thread> threads_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_ENGINE_DOUBLE_H_
