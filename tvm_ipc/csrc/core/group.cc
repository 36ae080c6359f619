/* SPDX-License-Identifier: Apache-2.0 */
/*! \file group.cc */
#include "core/group.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

#include "core/process.h"

namespace tvm_ipc {

namespace {

/*! \brief The members of a rank's team, in rank order. */
std::vector<int> Members(int first, int count) {
  std::vector<int> ranks(count);
  for (int i = 0; i < count; ++i) ranks[i] = first + i;
  return ranks;
}

std::shared_ptr<Arena> MakeArena(const std::shared_ptr<Segments>& segments, File segment) {
  const size_t start = ArenaStart(segments->control().num_ranks);
  const size_t limit = segments->control().arena_bytes;
  // The file is closed and the memory unmapped when the last storage is gone, not with the rank.
  auto file = std::make_shared<File>(std::move(segment));
  auto commit = [segments, start, file](size_t offset, size_t bytes) {
    BlockSignals blocked;  // one would interrupt the call, and undo what it has done
    return fallocate(file->get(), 0, static_cast<off_t>(start + offset),
                     static_cast<off_t>(bytes)) == 0;
  };
  auto release = [start, file](size_t offset, size_t bytes) {
    fallocate(file->get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(start + offset), static_cast<off_t>(bytes));
  };
  return std::make_shared<Arena>(limit, commit, release);
}

thread_local std::unique_ptr<Rank> current_rank;

}  // namespace

std::shared_ptr<Segments> Segments::Map(const std::string& token, int control,
                                        const std::vector<int>& files) {
  // Ranks that are threads of one process share one mapping.
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<Segments>> mapped;
  std::lock_guard<std::mutex> lock(mutex);
  for (auto it = mapped.begin(); it != mapped.end();) {
    it = it->second.expired() ? mapped.erase(it) : std::next(it);
  }
  if (auto found = mapped[token].lock()) return found;
  std::shared_ptr<Segments> result(new Segments());
  const size_t control_bytes = FileBytes(control);
  result->control_ = static_cast<Control*>(MapFile(control, control_bytes));
  result->control_bytes_ = control_bytes;
  for (int file : files) {
    result->segment_bytes_ = FileBytes(file);
    result->bases_.push_back(static_cast<uint8_t*>(MapFile(file, result->segment_bytes_)));
  }
  mapped[token] = result;
  return result;
}

Segments::~Segments() {
  if (control_ != nullptr) munmap(control_, control_bytes_);
  for (uint8_t* base : bases_) munmap(base, segment_bytes_);
}

Team::Team(std::shared_ptr<Segments> segments, int seat_row, std::vector<int> ranks, int me,
           const RankOptions& options)
    : segments_(std::move(segments)),
      row_(seat_row),
      ranks_(std::move(ranks)),
      me_(me),
      options_(options) {}

void Team::SkipTo(uint32_t step) {
  step_ = step;
  for (Slot& slot : seat(me_).slot) slot.seq.store(step, std::memory_order_relaxed);
}

void Team::Enter(const Descriptor& mine) {
  const uint32_t step = ++step_;
  Seat& own = seat(me_);
  Slot& slot = own.slot[step & 1];
  slot.descriptor = mine;
  Publish(slot.seq, step, own.sleepers);  // pairs with the acquire in WaitFor
  bool agree = true;
  for (int i = 0; i < size(); ++i) {
    if (i == me_) continue;
    Seat& other = seat(i);
    const Slot& theirs = other.slot[step & 1];
    switch (WaitFor(theirs.seq, step, other.sleepers, segments_->control().abort, options_.wait,
                    options_.deadline)) {
      case WaitResult::kReached:
        break;
      case WaitResult::kAborted:
        Fail(kind::kPeer, Describe(mine), " was stopped: ", DescribeAbort(segments_->control()));
      case WaitResult::kDeadline:
        FailDeadline(mine);
    }
    agree = agree && theirs.descriptor.Agrees(mine);
  }
  if (!agree) FailMismatch();
}

void Team::FailDeadline(const Descriptor& mine) const {
  std::ostringstream missing;
  const char* separator = "";
  for (int i = 0; i < size(); ++i) {
    const Seat& other = seat(i);
    if (Reached(other.slot[step_ & 1].seq.load(std::memory_order_acquire), step_)) continue;
    missing << separator << "rank " << ranks_[i] << " (pid "
            << segments_->control().ranks[ranks_[i]].pid.load(std::memory_order_relaxed) << ")";
    const Slot& last = other.slot[(step_ - 1) & 1];
    if (last.seq.load(std::memory_order_acquire) == step_ - 1 && step_ != 1) {
      missing << ", last seen in " << Describe(last.descriptor);
    }
    separator = "; ";
  }
  Fail(kind::kDeadline, Describe(mine), " waited ",
       std::chrono::duration<double>(options_.deadline).count(), " s for ", missing.str(),
       "; every rank must make the same collective calls in the same order, or raise the timeout"
       " (TVM_IPC_TIMEOUT)");
}

void Team::FailMismatch() const {
  std::ostringstream os;
  os << "the ranks disagree";
  const char* separator = ": ";
  for (int i = 0; i < size(); ++i) {
    os << separator << "rank " << ranks_[i] << " called " << Describe(shown(i));
    separator = "; ";
  }
  throw Error(kind::kMismatch, os.str());
}

Rank::Rank(int id, std::shared_ptr<Segments> segments, RankOptions options,
           std::shared_ptr<Connection> connection, File segment)
    : id_(id),
      num_ranks_(segments->control().num_ranks),
      group_size_(num_ranks_ / segments->control().num_groups),
      segments_(segments),
      options_(options),
      connection_(std::move(connection)),
      world_(segments, 0, Members(0, num_ranks_), id, options_),
      group_(segments, 1, Members(id / group_size_ * group_size_, group_size_), id % group_size_,
             options_),
      generation_(control().generation.load(std::memory_order_acquire)),
      sent_(num_ranks_),
      received_(num_ranks_),
      arena_(MakeArena(segments, std::move(segment))) {}

Rank::~Rank() {
  left_->store(true);
  connection_->Send(FrameType::kBye, "");
}

void Rank::CheckSession() {
  Control& shared = control();
  if (shared.abort.load(std::memory_order_acquire) != 0) {
    Fail(kind::kPeer, "the operation was not started: ", DescribeAbort(shared));
  }
  const uint32_t generation = shared.generation.load(std::memory_order_acquire);
  if (generation != generation_) {
    generation_ = generation;
    world_.Restart();
    group_.Restart();
    std::fill(sent_.begin(), sent_.end(), 0);
    std::fill(received_.begin(), received_.end(), 0);
  }
}

Team& Rank::Begin(bool in_group) {
  CheckSession();
  return in_group && group_size_ != num_ranks_ ? group_ : world_;
}

uint8_t* Rank::arena_base() const { return segments_->base(id_) + ArenaStart(num_ranks_); }

int64_t Rank::OffsetOf(const void* data, size_t bytes) const {
  const auto* start = static_cast<const uint8_t*>(data);
  const uint8_t* base = segments_->base(id_);
  if (start < arena_base() || start + bytes > base + segments_->segment_bytes()) return -1;
  return start - base;
}

uint8_t* Rank::packet_buffer(int src, int dst, uint32_t packet) const {
  return segments_->base(src) + 4 * kStageBytes + (2 * dst + (packet & 1)) * kPacketBytes;
}

void Rank::FailSession() {
  control().ranks[id_].failed.store(1, std::memory_order_release);
  Abort(control(), AbortReason::kFailed, id_);
}

Rank* CurrentRank() { return current_rank.get(); }

void SetCurrentRank(std::unique_ptr<Rank> rank) { current_rank = std::move(rank); }

void Abort(Control& control, AbortReason reason, int rank) {
  uint32_t none = 0;
  control.abort.compare_exchange_strong(none, AbortWord(reason, rank), std::memory_order_acq_rel);
  for (auto& row : control.seats) {
    for (int r = 0; r < control.num_ranks; ++r) {
      if (row[r].sleepers.load(std::memory_order_seq_cst) == 0) continue;
      for (Slot& slot : row[r].slot) WakeAll(slot.seq);
    }
  }
}

void StartAgain(Control& control) {
  auto clear = [](Slot(&slots)[2]) {
    for (Slot& slot : slots) slot.seq.store(0, std::memory_order_relaxed);
  };
  for (auto& row : control.seats) {
    for (int r = 0; r < control.num_ranks; ++r) clear(row[r].slot);
  }
  for (int i = 0; i < control.num_ranks * control.num_ranks; ++i) {
    clear(control.channels()[i].slot);
    control.channels()[i].taken.store(0, std::memory_order_relaxed);
  }
  for (int r = 0; r < control.num_ranks; ++r) {
    control.ranks[r].failed.store(0);
    control.ranks[r].exchanges.store(0);
  }
  control.generation.fetch_add(1, std::memory_order_release);
  control.abort.store(0, std::memory_order_release);
}

std::string DescribeAbort(const Control& control) {
  const uint32_t word = control.abort.load(std::memory_order_acquire);
  const int rank = static_cast<int>(word >> 8);
  switch (static_cast<AbortReason>(word & 0xff)) {
    case AbortReason::kFailed:
      return Text("rank ", rank, " failed; its own error says why");
    case AbortReason::kDied:
      return Text("rank ", rank, " (pid ", control.ranks[rank].pid.load(), ") died");
    case AbortReason::kClosed:
      return "the session was closed";
    case AbortReason::kNone:
      break;
  }
  return "the session has recovered since";
}

std::string Describe(const Descriptor& d) {
  std::ostringstream os;
  switch (d.op) {
    case Op::kNone:
      return "nothing";
    case Op::kAllReduce:
      os << "allreduce(" << Name(d.kind) << ", strategy " << static_cast<int>(d.strategy)
         << ", flags " << static_cast<int>(d.flags) << ")";
      break;
    case Op::kAllGather:
      os << "allgather";
      break;
    case Op::kBroadcast:
      os << "broadcast";
      break;
    case Op::kScatter:
      os << "scatter";
      break;
    case Op::kGather:
      os << "gather";
      break;
    case Op::kSend:
      os << "send";
      break;
  }
  if (d.root >= 0) os << " from/to rank " << d.root;
  os << " of " << d.count << " x " << Name(d.type);
  return os.str();
}

}  // namespace tvm_ipc
