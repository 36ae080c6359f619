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
#include "engine/engine.h"

namespace tvm_ipc::engine {

namespace {

/*! \brief The longest message, far above what there is: MPI counts in 32 bits. */
constexpr uint64_t kMostBytes = 1 << 30;
constexpr int kCountsTag = 1;
/*! \brief Above what any MPI calls MPI_MAX_ERROR_STRING. */
constexpr size_t kErrorBytes = 8192;

}  // namespace

/*! \brief Memory that MPI reads and writes until all of it is told. */
struct MpiTransport::Counts {
  struct Line {
    int64_t generation;
    int64_t sent;
  };
  /*! \brief By node. */
  std::vector<Line> told, heard;
  std::vector<uint8_t> requests, statuses;
  size_t asked = 0;
  bool all = false;

  /*! \brief Stays, where leak checkers see it, if a flush ends before MPI has let go of it. */
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

void MpiTransport::Start(const WireWork& work) {
  if (work.bytes > kMostBytes) {
    Fail(kind::kRuntime, "a message between nodes has ", work.bytes, " bytes; it may have ",
         kMostBytes);
  }
  const size_t number = under_way_.size();
  if (requests_.size() < (number + 1) * world_.request_bytes) {
    const size_t room = std::max<size_t>(64, 2 * number);
    requests_.resize(room * world_.request_bytes);
    statuses_.resize(room * world_.status_bytes);
    ended_.resize(room);
  }
  auto* data = reinterpret_cast<void*>(work.address);
  const int count = static_cast<int>(work.bytes);
  if (work.sends != 0) {
    Check("MPI_Isend", mpi_.Isend(data, count, world_.byte, work.peer, work.tag, world_.messages,
                                  Request(number)));
    ++sent_[work.peer];
  } else {
    Check("MPI_Irecv", mpi_.Irecv(data, count, world_.byte, work.peer, work.tag, world_.messages,
                                  Request(number)));
  }
  const bool in_turn = GoInTurn(work.tag);
  under_way_.push_back(
      {work.rank, work.request, work.sends != 0 ? -1 : work.peer, work.bytes, in_turn});
  if (in_turn) ++in_turn_;
}

void MpiTransport::Progress(std::vector<Ended>* ended) {
  if (under_way_.empty()) return;
  int count = 0;
  Check("MPI_Testsome", mpi_.Testsome(static_cast<int>(under_way_.size()), requests_.data(), &count,
                                      ended_.data(), statuses_.data()));
  if (count <= 0) return;  // nothing has ended, or, below zero, nothing was under way
  for (int i = 0; i < count; ++i) {
    UnderWay& one = under_way_[static_cast<size_t>(ended_[i])];
    if (one.in_turn) --in_turn_;
    if (one.source >= 0) {
      int taken_back = 0;
      if (cancelled_) Check("MPI_Test_cancelled", mpi_.Test_cancelled(Status(i), &taken_back));
      if (taken_back != 0) continue;
      int came = 0;
      Check("MPI_Get_count", mpi_.Get_count(Status(i), world_.byte, &came));
      one.bytes = static_cast<uint64_t>(came);
      ++came_[one.source];
    }
    ended->push_back({one.rank, one.request, one.bytes});
  }
  // The last ones take the places of those that have ended, from behind.
  std::sort(ended_.begin(), ended_.begin() + count, std::greater<int>());
  for (int i = 0; i < count; ++i) {
    const auto gone = static_cast<size_t>(ended_[i]);
    const size_t last = under_way_.size() - 1;
    if (gone != last) {
      under_way_[gone] = under_way_[last];
      memcpy(Request(gone), Request(last), world_.request_bytes);
    }
    under_way_.pop_back();
  }
}

/*!
 * MPI cannot take back a send, so whom it was meant for receives it into a bin: from each node as
 * many messages as that one has sent. They come in the order in which they were sent, before those
 * of the next generation.
 */
bool MpiTransport::Flush(uint32_t generation, const std::atomic<bool>& stopped) {
  cancelled_ = true;
  for (size_t i = 0; i < under_way_.size(); ++i) {
    if (under_way_[i].source >= 0) Check("MPI_Cancel", mpi_.Cancel(Request(i)));
  }
  Counts* const told = Counts::New();
  Tell(told, generation);
  std::vector<Ended> ended;
  Pauses pauses;
  // All looks are made in every round: what one waits for moves only while others look.
  while (!stopped.load(std::memory_order_acquire)) {
    ended.clear();
    Progress(&ended);
    if (!ended.empty()) pauses.Moved();
    // A receive that was taken back and yet got its message counts as soon as it has ended.
    if (Told(told, generation) && !Receives()) {
      bool missing = false;
      for (int node = 0; node < nodes_; ++node) {
        if (came_[node] >= told->heard[node].sent) continue;
        missing = true;
        Drop(node, told->heard[node].sent);
      }
      if (under_way_.empty() && !missing) {
        Counts::Delete(told);
        cancelled_ = false;
        return true;
      }
    }
    pauses.Pause([](Pauses::Nanoseconds most) { std::this_thread::sleep_for(most); });
  }
  return false;
}

bool MpiTransport::Receives() const {
  return std::any_of(under_way_.begin(), under_way_.end(),
                     [](const UnderWay& one) { return one.source >= 0; });
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

/*! \brief Whether all nodes have told what they sent, and know what this one has. */
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

/*! \brief Receive into a bin what has come from a node, as far as it belongs there. */
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
