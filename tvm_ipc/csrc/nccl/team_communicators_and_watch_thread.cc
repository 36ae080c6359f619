/* SPDX-License-Identifier: Apache-2.0 */
/*! \file team_communicators_and_watch_thread.cc */
#include "nccl/team_communicators_and_watch_thread.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/collective_step_barrier.h"
#include "core/current_stream_hooks.h"
#include "driver/owned_streams_and_events.h"

namespace tvm_ipc::nccl {

namespace {

using Clock = std::chrono::steady_clock;

/*! \brief The polling interval of the watch thread while operations are in flight. */
constexpr std::chrono::milliseconds kLook{5};
/*! \brief How long operations in flight may still take after the session has stopped. */
constexpr std::chrono::milliseconds kGrace{250};
/*! \brief How long finalizing the communicators may take when a session ends. */
constexpr std::chrono::seconds kLeave{10};
/*! \brief How long a device may take to become idle after its communicators have ended. */
constexpr std::chrono::seconds kRest{60};

/*! \brief The name of a CUDA graph's operations in errors. */
constexpr char kGraph[] = "a CUDA graph with operations between ranks";

/*! \brief Return whether the session was aborted, rather than closed. */
bool HasFailed(const Control& control) {
  const AbortReason reason = ReasonOf(control.abort.load(std::memory_order_acquire));
  return reason != AbortReason::kNone && reason != AbortReason::kClosed;
}

Descriptor About(const OpName& op) {
  Descriptor descriptor;
  descriptor.op = op;
  return descriptor;
}

}  // namespace

Communicators::Communicators(Rank& rank, std::shared_ptr<cuda::Device> device)
    : rank_(rank),
      library_(TheLibrary()),
      device_(std::move(device)),
      driver_(device_->driver()),
      limits_{rank.control(), rank.options().deadline},
      layouts_(rank),
      in_flight_ops_(device_) {
  if (rank.control().ring_bytes != 0) ring_.emplace(rank);
  if (rank.num_ranks() > 1) Follow(rank.control().generation.load(std::memory_order_acquire));
  watch_ = std::thread([this] { Watch(); });
}

Communicators::~Communicators() {
  if (rank_.in_forked_child()) {
    watch_.detach();  // the thread does not exist in this process
    return;
  }
  // The watch thread shuts down the communicators: this thread may be exiting, with its
  // thread-local state of TVM, the driver and NCCL already destroyed.
  if (std::lock_guard<std::mutex> lock(watch_mutex_); true) stop_ = true;
  watched_.notify_all();
  watch_.join();
}

void Communicators::Leave() {
  const auto end = Clock::now() + limits_.deadline + kRest;
  while (Look() && Clock::now() < end) std::this_thread::sleep_for(kLook);
  try {
    Await(stream_.load(std::memory_order_relaxed));
  } catch (const Error&) {
    // Nobody is left to receive the error.
  }
  const bool closed = !HasFailed(rank_.control());
  // Peers may still receive messages that this rank has already sent.
  const auto patience = std::min<std::chrono::nanoseconds>(limits_.deadline, kLeave);
  // All ranks leave their teams in the same order, because each waits until all members of a team
  // leave it.
  std::map<TeamId, Entry*> in_order;
  for (auto& [barrier, entry] : entries_) in_order[barrier->team()] = &entry;
  for (auto& [team, entry] : in_order) {
    if (entry->communicator == nullptr) continue;
    if (!closed || !entry->communicator->Leave(patience)) entry->communicator->End();
  }
  entries_.clear();
  in_flight_ops_.Close();
  // The next step frees memory, for which the driver waits for all devices and blocks launches. So
  // the watch threads of this process's other ranks must first end the operations that wait for
  // this rank.
  if (!closed) InFlightOps::AwaitProcess(patience);
}

cuda::Stream Communicators::stream() const {
  return static_cast<cuda::Stream>(ProgramStreams().current(cuda::kDeviceType, device_->ordinal()));
}

Gathering Communicators::Gather(TeamId team) {
  // A group of all ranks uses the communicator of the world.
  if (team == kGroup && rank_.group_size() == rank_.num_ranks()) team = kWorld;
  return Gathering(rank_, ring_ ? &*ring_ : nullptr, layouts_.Of(team));
}

void Communicators::Run(Gathering& team, const Descriptor& mine, const Launch& launch) {
  Check();
  // If a peer fails right after the host barrier, it must not free its memory before this rank's
  // operation has ended.
  const InFlightOps::EnqueueScope incoming;
  team.Enter(mine);
  Entry& entry = Of(team);
  ++entry.operations;
  Enqueue(entry, mine, team.Where(), launch);
  if (meets_ && !capturing(stream())) team.Enter(About("launch"));
}

void Communicators::RunMessage(const Descriptor& mine, int sender, int receiver,
                               const Launch& launch) {
  Check();
  const bool sends = sender == rank_.id();
  const std::string where = sends ? Text(" to rank ", receiver) : Text(" from rank ", sender);
  const uint64_t hash = HashOf({sender, receiver});
  world_->messages += sends ? hash : -hash;
  Enqueue(*world_, mine, where, launch);
}

void Communicators::Follow(uint32_t generation) {
  SeeStream(stream());
  if (rank_.num_ranks() == 1 || (world_ != nullptr && generation == generation_)) return;
  Gathering all = Gather(kWorld);
  world_ = &Of(all);
  generation_ = generation;
}

Communicators::Entry& Communicators::Of(Gathering& team) {
  const uint32_t generation = team.here().generation();
  Entry* entry = nullptr;
  if (std::lock_guard<std::mutex> lock(mutex_); true) entry = &entries_[&team.here()];
  if (entry->communicator != nullptr && entry->generation == generation) return *entry;
  const bool sound =
      entry->communicator != nullptr && !entry->communicator->ended() && !entry->captured_alone;
  const Agreed agreed =
      team.Agree(About("communicator"), sound ? 1 + entry->operations : 0, entry->messages);
  meets_ = meets_ || agreed.threads;
  if (!agreed.same || agreed.sum != 0) Make(team, *entry);
  entry->generation = generation;
  return *entry;
}

void Communicators::Make(Gathering& team, Entry& entry) {
  auto what = [&] { return "the communicator" + team.Where(); };
  if (capturing(stream())) {
    Fail(kind::kRuntime, what(),
         " cannot be made while a CUDA graph is captured; let the members of the team do an"
         " operation before");
  }
  std::unique_ptr<Communicator> former;
  if (std::lock_guard<std::mutex> lock(mutex_); true) former = std::move(entry.communicator);
  if (former != nullptr) former->End();
  if (entry.captured) graphs_lost_ = true;
  entry.operations = 0;
  entry.messages = 0;
  entry.last.reset();
  // The first member creates the id by which the others connect.
  UniqueId id{};
  const cuda::Here here(*device_);
  if (team.index() == 0) {
    const Result result = library_.GetUniqueId(&id);
    if (result != kSuccess) {
      Fail(kind::kRuntime, what(), ": ", library_.GetUniqueId.name(), ": ",
           library_.Describe(result));
    }
  }
  id = team.Tell(About("communicator"), id);
  auto made = std::make_unique<Communicator>(limits_, what, team.size(), team.index(), id);
  std::lock_guard<std::mutex> lock(mutex_);
  entry.communicator = std::move(made);
}

void Communicators::Enqueue(Entry& entry, const Descriptor& mine, const std::string& where,
                            const Launch& launch) {
  const cuda::Here here(*device_);
  const cuda::Stream on = stream();
  auto calls = [&](Handle handle) { return launch(handle, on); };
  auto what = [&] { return Describe(mine) + where; };
  auto enqueue = [&] {
    try {
      entry.communicator->Enqueue(what, calls);
    } catch (...) {
      // Peers may have begun the operation that this rank could not enqueue.
      entry.communicator->End();
      if (entry.captured) graphs_lost_ = true;
      throw;
    }
  };
  if (capturing(on)) {
    // Record no events: they would become part of the graph. A replay is ordered by the stream on
    // which the graph is launched, not by the operations that ran during capture.
    Capture(entry, mine);
    captured_ = true;
    enqueue();
    return;
  }
  SeeStream(on);
  // Equal handles do not mean equal streams, unless they are default streams: a new stream may have
  // the handle of one that was destroyed.
  if (entry.last != nullptr && !(entry.stream == on && cuda::IsDefaultStream(on))) {
    driver_.cuStreamWaitEvent("to order two streams of a team", on, *entry.last, 0);
  }
  InFlightOp in_flight_op;
  in_flight_op.descriptor = mine;
  in_flight_op.where = where;
  in_flight_op.stream = on;
  in_flight_op.begin = Events::Record(in_flight_ops_.events(), on);
  const Events::Shared begin = in_flight_op.begin;
  // Let the watch thread poll the operation from now on. This thread may be blocked after NCCL has
  // accepted the operation, for example by a peer of this process that frees memory and so waits
  // for all devices. Then only the watch thread can end the operation, when the session stops.
  in_flight_ops_.Add(std::move(in_flight_op));
  if (std::lock_guard<std::mutex> lock(watch_mutex_); !std::exchange(something_, true)) {
    watched_.notify_all();
  }
  try {
    enqueue();
    const Events::Shared end = Events::Record(in_flight_ops_.events(), on);
    entry.stream = on;
    entry.last = end;
    in_flight_ops_.Enqueued(begin, end);
  } catch (...) {
    // The device may already have the operation, but the watch thread could not poll it.
    entry.communicator->End();
    in_flight_ops_.Drop(begin);
    throw;
  }
}

void Communicators::Capture(Entry& entry, const Descriptor& mine) {
  entry.captured = true;
  const bool of_all = mine.root < 0 && mine.layout_hash == 0 && !(mine.op == OpName("send"));
  if (!of_all) entry.captured_alone = true;
}

bool Communicators::capturing(cuda::Stream stream) const {
  int state = cuda::kNotCapturing;
  const cuda::Here here(*device_);
  driver_.cuStreamIsCapturing("to see whether a graph is captured", stream, &state);
  return state != cuda::kNotCapturing;
}

void Communicators::SeeStream(cuda::Stream stream) {
  stream_.store(cuda::IsDefaultStream(stream) ? stream : nullptr, std::memory_order_relaxed);
}

bool Communicators::busy() const {
  return driver_.cuStreamQuery.Try(stream_.load(std::memory_order_relaxed)) == cuda::kNotReady;
}

void Communicators::Settle() {
  const cuda::Here here(*device_);
  const cuda::Stream on = stream();
  SeeStream(on);
  Await(on);
  // Wait for a poll that has already begun: it may find an error.
  if (std::lock_guard<std::mutex> lock(look_mutex_); true) Check();
}

void Communicators::Await(cuda::Stream on) {
  const Events::Shared end = Events::Record(in_flight_ops_.events(), on);
  const auto begun = Clock::now();
  std::optional<Clock::time_point> stopped;
  for (int looks = 0;; ++looks) {
    const cuda::Status status = driver_.cuEventQuery.Try(*end);
    if (status == cuda::kSuccess) {
      const InFlightOps::Found found = in_flight_ops_.Look(limits_.deadline);
      if (found.state == InFlightOps::State::kEmpty || found.state == InFlightOps::State::kBroken)
        break;
    } else if (status != cuda::kNotReady) {
      Lose(Error(kind::kRuntime, Text("what rank ", rank_.id(), " has started on ", device_->name(),
                                      " has failed: ", cuda::TextOf(status))));
      break;
    }
    const auto waited = Clock::now() - begun;
    if (captured_ && !has_lost_ && waited > limits_.deadline) {
      // The watch thread cannot see how far the device is in a graph.
      Lose(Error(kind::kDeadline,
                 Text("rank ", rank_.id(), " waited ",
                      std::chrono::duration<double>(limits_.deadline).count(),
                      " s for its device, which runs CUDA graphs with operations between ranks;"
                      " every rank must launch the same, or raise the timeout (TVM_IPC_TIMEOUT)")));
    }
    // The watch thread does not see graphs on the program's own streams.
    if (captured_ && !has_lost_ && HasFailed(rank_.control())) {
      if (!stopped) stopped = Clock::now();
      if (Clock::now() - *stopped > kGrace) LoseStopped(kGraph);
    }
    if (has_lost_ && waited > limits_.deadline + kRest) break;
    if (looks < 64) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::min<Clock::duration>(waited / 16, kLook / 4));
    }
  }
}

void Communicators::Check() {
  if (has_lost_) {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::optional<Error> error = std::exchange(lost_, std::nullopt);
    has_lost_ = false;
    if (error) throw *error;
  }
  if (!graphs_lost_) return;
  Fail(kind::kRuntime,
       "an error has ended a communicator of which CUDA graphs of this program hold operations;"
       " they cannot run any more: open a new session");
}

void Communicators::Lose(const Error& error) {
  if (std::lock_guard<std::mutex> lock(mutex_); !lost_) {
    lost_ = error;
    has_lost_ = true;
  }
  EndAll();
}

void Communicators::LoseStopped(const std::string& what) {
  Lose(Error(kind::kPeer, Text(what, " was stopped: ", DescribeAbort(rank_.control()))));
}

void Communicators::EndAll() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [barrier, entry] : entries_) {
    if (entry.communicator == nullptr) continue;
    entry.communicator->End();
    if (entry.captured) graphs_lost_ = true;
  }
}

void Communicators::Watch() {
  const cuda::Here here(*device_);
  // While a thread captures a graph, some driver calls are forbidden in all threads and would
  // invalidate the capture, unless the calling thread is in relaxed mode.
  int mode = cuda::kRelaxedCapture;
  driver_.cuThreadExchangeStreamCaptureMode.Try(&mode);
  std::unique_lock<std::mutex> lock(watch_mutex_);
  while (!stop_) {
    if (!something_ && !captured_) {
      watched_.wait(lock, [this] { return stop_ || something_; });
      continue;
    }
    watched_.wait_for(lock, kLook, [this] { return stop_; });
    something_ = false;
    lock.unlock();
    const bool more = Look();
    lock.lock();
    something_ = something_ || more;
  }
  lock.unlock();
  Leave();
}

bool Communicators::Look() {
  std::lock_guard<std::mutex> look(look_mutex_);
  const InFlightOps::Found found = in_flight_ops_.Look(limits_.deadline);
  const bool flying = found.state != InFlightOps::State::kEmpty;
  const double seconds = std::chrono::duration<double>(limits_.deadline).count();
  if (found.state == InFlightOps::State::kBroken) {
    in_flight_ops_.Clear();
    Lose(Error(kind::kRuntime, Text(found.what, " has failed on ", device_->name(), ": ",
                                    cuda::TextOf(found.status))));
    return false;
  }
  if (found.state == InFlightOps::State::kLate && !has_lost_) {
    Lose(Error(
        kind::kDeadline,
        Text(found.what, " has begun on ", device_->name(), " and has not ended within ", seconds,
             " s: a peer's device has not come to it; every rank must make the same"
             " collective calls in the same order, or raise the timeout"
             " (TVM_IPC_TIMEOUT)")));
    return true;
  }
  const Control& control = rank_.control();
  if (control.abort.load(std::memory_order_acquire) == 0 || has_lost_) {
    stopped_.reset();
  } else if (flying || (captured_ && busy())) {
    const auto now = Clock::now();
    if (!stopped_) stopped_ = now;
    if (now - *stopped_ > kGrace) {
      LoseStopped(flying ? found.what : kGraph);
      stopped_.reset();
    }
  }
  // A thread that is enqueueing gets NCCL's errors itself.
  if (found.state > InFlightOps::State::kEnqueuing && !has_lost_) {
    std::string error;
    if (std::lock_guard<std::mutex> lock(mutex_); true) {
      for (auto& [barrier, entry] : entries_) {
        if (entry.communicator != nullptr && error.empty()) {
          error = entry.communicator->AsynchronousError();
        }
      }
    }
    if (!error.empty()) {
      Lose(Error(kind::kRuntime, Text(found.what, " has failed: ", error)));
    }
  }
  return flying;
}

}  // namespace tvm_ipc::nccl
