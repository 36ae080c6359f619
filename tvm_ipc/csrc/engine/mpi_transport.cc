/* SPDX-License-Identifier: Apache-2.0 */
/*! \file mpi_transport.cc */
#include "engine/mpi_transport.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <list>
#include <mutex>
#include <thread>

#include "core/error.h"
#include "engine/internode_progress_engine.h"

namespace tvm_ipc::engine {

namespace {

/*! \brief The longest message, because MPI counts in 32 bits. Actual messages are far shorter. */
constexpr uint64_t kMostBytes = 1 << 30;
constexpr int kCountsTag = 1;
/*! \brief More than MPI_MAX_ERROR_STRING of any MPI. */
constexpr size_t kErrorBytes = 8192;

}  // namespace

/*! \brief Message counts of all nodes, which MPI reads and writes until all are exchanged. */
struct MpiTransport::Counts {
  struct Line {
    int64_t generation;
    int64_t sent;
  };
  /*! \brief Indexed by node. */
  std::vector<Line> told, heard;
  std::vector<uint8_t> requests, statuses;
  size_t asked = 0;
  bool all = false;

  /*! \brief Allocate counts. If a flush ends while MPI still uses them, they stay allocated,
   *         reachable for leak checkers. */
  static Counts* New() {
    std::lock_guard<std::mutex> lock(Mutex());
    return &All().emplace_back();
  }
  static void Delete(Counts* counts) {
    std::lock_guard<std::mutex> lock(Mutex());
    All().remove_if([&](const Counts& one) { return &one == counts; });
  }

 private:
  static std::mutex& Mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::list<Counts>& All() {
    static auto* const all = new std::list<Counts>;
    return *all;
  }
};

MpiTransport::MpiTransport(const MpiFunctions& functions, const MpiWorld& world, int nodes,
                           int node)
    : mpi_(functions), world_(world), nodes_(nodes), node_(node), sent_(nodes), came_(nodes) {}

void MpiTransport::Check(const char* call, int result) const {
  if (result == 0) return;
  char text[kErrorBytes] = "";
  int length = 0;
  if (mpi_.Error_string(result, text, &length) != 0) length = 0;
  Fail(kind::kRuntime, call, " of node ", node_, ": ",
       length > 0 ? std::string(text, static_cast<size_t>(length)) : Text("error ", result));
}

void MpiTransport::Start(const RingMessage& message) {
  if (message.bytes > kMostBytes) {
    Fail(kind::kRuntime, "a message between nodes has ", message.bytes, " bytes; it may have ",
         kMostBytes);
  }
  const size_t number = in_flight_.size();
  if (requests_.size() < (number + 1) * world_.request_bytes) {
    const size_t room = std::max<size_t>(64, 2 * number);
    requests_.resize(room * world_.request_bytes);
    statuses_.resize(room * world_.status_bytes);
    ended_.resize(room);
  }
  auto* data = reinterpret_cast<void*>(message.address);
  const int count = static_cast<int>(message.bytes);
  if (message.sends != 0) {
    Check("MPI_Isend", mpi_.Isend(data, count, world_.byte, message.peer, message.tag,
                                  world_.messages, Request(number)));
    ++sent_[message.peer];
  } else {
    Check("MPI_Irecv", mpi_.Irecv(data, count, world_.byte, message.peer, message.tag,
                                  world_.messages, Request(number)));
  }
  const bool sequential = IsSequential(message.tag);
  in_flight_.push_back({message.rank, message.request, message.sends != 0 ? -1 : message.peer,
                        message.bytes, sequential});
  if (sequential) ++scheduled_;
}

void MpiTransport::Progress(std::vector<Ended>* ended) {
  if (in_flight_.empty()) return;
  int count = 0;
  Check("MPI_Testsome", mpi_.Testsome(static_cast<int>(in_flight_.size()), requests_.data(), &count,
                                      ended_.data(), statuses_.data()));
  if (count <= 0) return;  // 0: no request has ended; negative: no request was active
  for (int i = 0; i < count; ++i) {
    InFlight& message = in_flight_[static_cast<size_t>(ended_[i])];
    if (message.sequential) --scheduled_;
    if (message.source >= 0) {
      int taken_back = 0;
      if (cancelled_) Check("MPI_Test_cancelled", mpi_.Test_cancelled(Status(i), &taken_back));
      if (taken_back != 0) continue;
      int came = 0;
      Check("MPI_Get_count", mpi_.Get_count(Status(i), world_.byte, &came));
      message.bytes = static_cast<uint64_t>(came);
      ++came_[message.source];
    }
    ended->push_back({message.rank, message.request, message.bytes});
  }
  // Replace the entries that have ended by the last ones, in descending order.
  std::sort(ended_.begin(), ended_.begin() + count, std::greater<int>());
  for (int i = 0; i < count; ++i) {
    const auto gone = static_cast<size_t>(ended_[i]);
    const size_t last = in_flight_.size() - 1;
    if (gone != last) {
      in_flight_[gone] = in_flight_[last];
      memcpy(Request(gone), Request(last), world_.request_bytes);
    }
    in_flight_.pop_back();
  }
}

/*!
 * MPI cannot cancel a send, so its receiver discards the message: it receives as many messages from
 * each node as that node has sent. They arrive in the order in which they were sent, before those
 * of the next generation.
 */
bool MpiTransport::Flush(uint32_t generation, const std::atomic<bool>& stopped) {
  cancelled_ = true;
  for (size_t i = 0; i < in_flight_.size(); ++i) {
    if (in_flight_[i].source >= 0) Check("MPI_Cancel", mpi_.Cancel(Request(i)));
  }
  Counts* const told = Counts::New();
  Tell(told, generation);
  std::vector<Ended> ended;
  IdleBackoff idle_backoff;
  // Poll everything in every round: what one node waits for moves only while the others poll.
  while (!stopped.load(std::memory_order_acquire)) {
    ended.clear();
    Progress(&ended);
    if (!ended.empty()) idle_backoff.Moved();
    // A cancelled receive that got its message nevertheless is counted once it has ended.
    if (Told(told, generation) && !Receives()) {
      bool missing = false;
      for (int node = 0; node < nodes_; ++node) {
        if (came_[node] >= told->heard[node].sent) continue;
        missing = true;
        Drop(node, told->heard[node].sent);
      }
      if (in_flight_.empty() && !missing) {
        Counts::Delete(told);
        cancelled_ = false;
        return true;
      }
    }
    idle_backoff.Pause([](IdleBackoff::Nanoseconds most) { std::this_thread::sleep_for(most); });
  }
  return false;
}

bool MpiTransport::Receives() const {
  return std::any_of(in_flight_.begin(), in_flight_.end(),
                     [](const InFlight& message) { return message.source >= 0; });
}

void MpiTransport::Tell(Counts* counts, uint32_t generation) {
  const size_t nodes = static_cast<size_t>(nodes_);
  counts->heard.resize(nodes);
  counts->requests.resize(2 * nodes * world_.request_bytes);
  counts->statuses.resize(2 * nodes * world_.status_bytes);
  for (int node = 0; node < nodes_; ++node) counts->told.push_back({generation, sent_[node]});
  for (bool sends : {false, true}) {
    for (int node = 0; node < nodes_; ++node) {
      if (node == node_) continue;
      Counts::Line* line = &(sends ? counts->told : counts->heard)[node];
      constexpr int kBytes = sizeof(Counts::Line);
      void* request = &counts->requests[counts->asked++ * world_.request_bytes];
      Check("telling what was sent",
            sends
                ? mpi_.Isend(line, kBytes, world_.byte, node, kCountsTag, world_.control, request)
                : mpi_.Irecv(line, kBytes, world_.byte, node, kCountsTag, world_.control, request));
    }
  }
}

/*! \brief Return whether all counts are exchanged: those of all nodes, and this node's with all. */
bool MpiTransport::Told(Counts* counts, uint32_t generation) {
  if (counts->all) return true;
  int all = 0;
  Check("MPI_Testall", mpi_.Testall(static_cast<int>(counts->asked), counts->requests.data(), &all,
                                    counts->statuses.data()));
  if (all == 0) return false;
  for (int node = 0; node < nodes_; ++node) {
    if (node == node_ || counts->heard[node].generation == generation) continue;
    Fail(kind::kRuntime, "node ", node, " has recovered ", counts->heard[node].generation,
         " times, and node ", node_, " ", generation, " times");
  }
  counts->all = true;
  return true;
}

/*! \brief Receive and discard messages that have arrived from a node, up to the number it sent. */
void MpiTransport::Drop(int node, int64_t sent) {
  std::vector<uint8_t> bin, status(world_.status_bytes);
  while (came_[node] < sent) {
    int found = 0, bytes = 0;
    uint64_t message = 0;
    Check("MPI_Improbe",
          mpi_.Improbe(node, world_.any_tag, world_.messages, &found, &message, status.data()));
    if (found == 0) return;
    Check("MPI_Get_count", mpi_.Get_count(status.data(), world_.byte, &bytes));
    bin.resize(static_cast<size_t>(std::max(bytes, 1)));
    Check("MPI_Mrecv", mpi_.Mrecv(bin.data(), bytes, world_.byte, &message, status.data()));
    ++came_[node];
  }
}

}  // namespace tvm_ipc::engine
