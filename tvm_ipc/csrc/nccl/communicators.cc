/* SPDX-License-Identifier: Apache-2.0 */
/*! \file communicators.cc */
#include "nccl/communicators.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/meeting.h"
#include "core/streams.h"

namespace tvm_ipc::nccl {

namespace {

using Clock = std::chrono::steady_clock;

/*! \brief How often the watch looks while something is on its way. */
constexpr std::chrono::milliseconds kLook{5};
/*! \brief How long what is on its way may take to come to its end when the session has stopped. */
constexpr std::chrono::milliseconds kGrace{250};
/*! \brief How long the last meeting of all members may take when a session ends. */
constexpr std::chrono::seconds kLeave{10};
/*! \brief How long a device may take to come to rest when its communicators have ended. */
constexpr std::chrono::seconds kRest{60};

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
      flights_(device_) {
  if (rank.control().wire_bytes != 0) wire_.emplace(rank);
  if (rank.num_ranks() > 1) Follow(rank.control().generation.load(std::memory_order_acquire));
  watch_ = std::thread([this] { Watch(); });
}

Communicators::~Communicators() {
  if (rank_.forked()) {
    watch_.detach();  // it is not in this process
    return;
  }
  // This thread may be at its end, where what TVM, the driver and NCCL keep for each thread is
  // gone.
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
    // Nobody is left who could be told.
  }
  const uint32_t abort = rank_.control().abort.load(std::memory_order_acquire);
  const bool closed = abort == 0 || (abort & 0xff) == static_cast<uint32_t>(AbortReason::kClosed);
  // Peers may still receive what this rank has sent long ago.
  const auto patience = std::min<std::chrono::nanoseconds>(limits_.deadline, kLeave);
  // All ranks in one order: each waits for the members of a team until they leave it too.
  std::map<TeamId, Entry*> in_order;
  for (auto& [meeting, entry] : entries_) in_order[meeting->team()] = &entry;
  for (auto& [team, entry] : in_order) {
    if (entry->communicator == nullptr) continue;
    if (!closed || !entry->communicator->Leave(patience)) entry->communicator->End();
  }
  entries_.clear();
  flights_.Close();
  // What comes next frees memory: then the driver waits for all devices, and lets nobody enqueue.
  // The watches of this process's other ranks first end what waits for this one.
  if (!closed) Flights::AwaitProcess(patience);
}

cuda::Stream Communicators::stream() const {
  return static_cast<cuda::Stream>(ProgramStreams().current(cuda::kDeviceType, device_->ordinal()));
}

Gathering Communicators::Gather(TeamId team) {
  // A group of all ranks is the world, which has a communicator.
  if (team == kGroup && rank_.group_size() == rank_.num_ranks()) team = kWorld;
  return Gathering(rank_, wire_ ? &*wire_ : nullptr, layouts_.Of(team));
}

void Communicators::Run(Gathering& team, const Descriptor& mine, const Work& work) {
  Check();
  // A peer that fails as soon as they have met must not free its memory before this rank's part
  // ends.
  const Flights::Coming coming;
  team.Enter(mine);
  Entry& entry = Of(team);
  ++entry.operations;
  Enqueue(entry, mine, team.Where(), work);
  if (meets_ && !capturing(stream())) team.Enter(About("launch"));
}

void Communicators::RunMessage(const Descriptor& mine, int sender, int receiver, const Work& work) {
  Check();
  const bool sends = sender == rank_.id();
  const std::string where = sends ? Text(" to rank ", receiver) : Text(" from rank ", sender);
  const uint64_t hash = HashOf({sender, receiver});
  world_->messages += sends ? hash : -hash;
  Enqueue(*world_, mine, where, work);
}

void Communicators::Follow(uint32_t generation) {
  stream_.store(stream(), std::memory_order_relaxed);
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
  // The first member says how to find it.
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
                            const Work& work) {
  const cuda::Here here(*device_);
  const cuda::Stream on = stream();
  auto calls = [&](Handle handle) { return work(handle, on); };
  auto what = [&] { return Describe(mine) + where; };
  auto enqueue = [&] {
    try {
      entry.communicator->Enqueue(what, calls);
    } catch (...) {
      // Peers may have begun what this rank has not.
      entry.communicator->End();
      if (entry.captured) graphs_lost_ = true;
      throw;
    }
  };
  if (capturing(on)) {
    // Events would become a part of the graph. Replays run in the order of the stream that the
    // graph is launched on, whatever ran when it was captured.
    Capture(entry, mine);
    captured_ = true;
    enqueue();
    return;
  }
  stream_.store(on, std::memory_order_relaxed);
  if (entry.last != nullptr && entry.stream != on) {
    driver_.cuStreamWaitEvent("to order two streams of a team", on, *entry.last, 0);
  }
  Flight flight;
  flight.descriptor = mine;
  flight.where = where;
  flight.stream = on;
  flight.begin = Events::Record(flights_.events(), on);
  const Events::Shared begin = flight.begin;
  // Watched from now on: whatever holds this thread up after NCCL has taken it, such as a peer of
  // this process that frees memory and so waits for all devices, ends only where the session's end
  // ends it.
  flights_.Add(std::move(flight));
  if (std::lock_guard<std::mutex> lock(watch_mutex_); !std::exchange(something_, true)) {
    watched_.notify_all();
  }
  try {
    enqueue();
    const Events::Shared end = Events::Record(flights_.events(), on);
    entry.stream = on;
    entry.last = end;
    flights_.Enqueued(begin, end);
  } catch (...) {
    // The device may have it already, and nobody would watch it.
    entry.communicator->End();
    flights_.Drop(begin);
    throw;
  }
}

void Communicators::Capture(Entry& entry, const Descriptor& mine) {
  entry.captured = true;
  const bool of_all = mine.root < 0 && mine.parts == 0 && !(mine.op == OpName("send"));
  if (!of_all) entry.captured_alone = true;
}

bool Communicators::capturing(cuda::Stream stream) const {
  int state = cuda::kNotCapturing;
  const cuda::Here here(*device_);
  driver_.cuStreamIsCapturing("to see whether a graph is captured", stream, &state);
  return state != cuda::kNotCapturing;
}

bool Communicators::busy() const {
  return driver_.cuStreamQuery.Try(stream_.load(std::memory_order_relaxed)) == cuda::kNotReady;
}

void Communicators::Settle() {
  const cuda::Here here(*device_);
  const cuda::Stream on = stream();
  stream_.store(on, std::memory_order_relaxed);
  Await(on);
  // A look that began before this ends before it.
  if (std::lock_guard<std::mutex> lock(look_mutex_); true) Check();
}

void Communicators::Await(cuda::Stream on) {
  const Events::Shared end = Events::Record(flights_.events(), on);
  const auto begun = Clock::now();
  for (int looks = 0;; ++looks) {
    const cuda::Status status = driver_.cuEventQuery.Try(*end);
    if (status == cuda::kSuccess) {
      const Flights::Found found = flights_.Look(limits_.deadline);
      if (found.state == Flights::State::kEmpty || found.state == Flights::State::kBroken) break;
    } else if (status != cuda::kNotReady) {
      Lose(Error(kind::kRuntime, Text("what rank ", rank_.id(), " has started on ", device_->name(),
                                      " has failed: ", cuda::TextOf(status))));
      break;
    }
    const auto waited = Clock::now() - begun;
    if (captured_ && !has_lost_ && waited > limits_.deadline) {
      // The watch does not know where in a graph the device is.
      Lose(Error(kind::kDeadline,
                 Text("rank ", rank_.id(), " waited ",
                      std::chrono::duration<double>(limits_.deadline).count(),
                      " s for its device, which runs CUDA graphs with operations between ranks;"
                      " every rank must launch the same, or raise the timeout (TVM_IPC_TIMEOUT)")));
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

void Communicators::EndAll() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [meeting, entry] : entries_) {
    if (entry.communicator == nullptr) continue;
    entry.communicator->End();
    if (entry.captured) graphs_lost_ = true;
  }
}

void Communicators::Watch() {
  const cuda::Here here(*device_);
  // Some calls of the driver are forbidden to all threads while one of them captures a graph, and
  // would spoil it, unless they say that they know.
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
  const Flights::Found found = flights_.Look(limits_.deadline);
  const bool flying = found.state != Flights::State::kEmpty;
  const double seconds = std::chrono::duration<double>(limits_.deadline).count();
  if (found.state == Flights::State::kBroken) {
    flights_.Clear();
    Lose(Error(kind::kRuntime, Text(found.what, " has failed on ", device_->name(), ": ",
                                    cuda::TextOf(found.status))));
    return false;
  }
  if (found.state == Flights::State::kLate && !has_lost_) {
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
      const std::string what = flying ? found.what : "a CUDA graph with operations between ranks";
      Lose(Error(kind::kPeer, Text(what, " was stopped: ", DescribeAbort(control))));
      stopped_.reset();
    }
  }
  // Who enqueues hears of errors itself.
  if (found.state > Flights::State::kEnqueuing && !has_lost_) {
    std::string error;
    if (std::lock_guard<std::mutex> lock(mutex_); true) {
      for (auto& [meeting, entry] : entries_) {
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
