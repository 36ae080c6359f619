/* SPDX-License-Identifier: Apache-2.0 */
/*! \file group.cc */
#include "core/group.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

#include "core/process.h"
#include "core/teams.h"
#include "core/wire.h"

namespace tvm_ipc {

namespace {

/*! \brief The members of a rank's team, in rank order. */
std::vector<int> Members(int first, int count) {
  std::vector<int> ranks(count);
  for (int i = 0; i < count; ++i) ranks[i] = first + i;
  return ranks;
}

/*! \brief The place of a rank among others; their number if it is not there. */
int PlaceAmong(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

std::shared_ptr<Arena> MakeArena(const std::shared_ptr<Segments>& segments, File segment) {
  const size_t start = ArenaStart(segments->control());
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

/*! \brief The rank that a thread acts for. */
struct Acting {
  std::shared_ptr<Rank> rank;
  /*! \brief Whether the thread is the worker's own, with which the rank leaves the session. */
  bool owner = false;
  /*! \brief The recoveries when the thread began to act. */
  uint32_t generation = 0;

  ~Acting() { Stop(); }
  void Stop() {
    if (owner) rank->Leave();
    owner = false;
    rank.reset();
  }
};

thread_local Acting acting;

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
  result->bases_.resize(result->control_->num_ranks);
  for (size_t i = 0; i < files.size(); ++i) {
    result->segment_bytes_ = FileBytes(files[i]);
    result->bases_[result->control_->first_here + i] =
        static_cast<uint8_t*>(MapFile(files[i], result->segment_bytes_));
  }
  mapped[token] = result;
  return result;
}

Segments::~Segments() {
  if (control_ != nullptr) munmap(control_, control_bytes_);
  for (uint8_t* base : bases_) {
    if (base != nullptr) munmap(base, segment_bytes_);
  }
}

Rank::Rank(int id, std::shared_ptr<Segments> segments, RankOptions options,
           std::shared_ptr<Connection> connection, File segment)
    : id_(id),
      num_ranks_(segments->control().num_ranks),
      group_size_(num_ranks_ / segments->control().num_groups),
      segments_(segments),
      options_(options),
      connection_(std::move(connection)),
      world_(control(), kWorld, Members(0, num_ranks_), std::vector<int>(num_ranks_, kWorld), id,
             options_, options_.wait),
      group_(control(), kGroup, Members(id / group_size_ * group_size_, group_size_),
             std::vector<int>(group_size_, kGroup), id % group_size_, options_, options_.wait),
      made_(new std::atomic<Meeting*>[kMaxTeams]()),
      sent_(num_ranks_),
      received_(num_ranks_),
      arena_(MakeArena(segments, std::move(segment))) {}

Rank::~Rank() {
  works_.reset();
  endpoint_.reset();
  Leave();
  for (uint32_t i = 0; i < kMaxTeams; ++i) delete made_[i].load(std::memory_order_relaxed);
}

Works& Rank::works() {
  std::lock_guard<std::mutex> lock(works_mutex_);
  if (works_ == nullptr) works_ = endpoint_->MakeWorks();
  if (works_ == nullptr) works_ = std::make_unique<WorksOfThread>(*this);
  return *works_;
}

void Rank::Drain() {
  if (forked()) return;
  Works* works = nullptr;
  if (std::lock_guard<std::mutex> lock(works_mutex_); true) works = works_.get();
  if (works != nullptr) works->Drain();
}

void Rank::Leave() {
  Drain();
  if (left_->exchange(true)) return;
  connection_->Send(FrameType::kBye, "");
}

Turn Rank::Begin(TeamId team) {
  RequireOwnThread();
  Meeting& meeting = team == kWorld || (team == kGroup && group_size_ == num_ranks_) ? world_
                     : team == kGroup                                                ? group_
                                                                                     : Made(team);
  if (!meeting.here()) FailElsewhere(Text("the members of the team", meeting.Where()));
  return Take(meeting);
}

Turn Rank::Take(Meeting& meeting) {
  Turn turn{meeting, Busy(shared_ ? &meeting.busy() : nullptr)};
  if (turn.busy.refused()) {
    Fail(kind::kRuntime, "two threads of rank ", id_, " are in a collective", meeting.Where(),
         " at once; let each have a team of its own (another `copy` of the same ranks), or let them"
         " take turns");
  }
  meeting.Follow(CheckSession());
  return turn;
}

void Rank::FailElsewhere(const std::string& what) const {
  Fail(kind::kValue, what, " are on several nodes, and the backend ", backend_->name(),
       " moves data inside of one; use teams of ranks of one node");
}

int Rank::SizeOf(TeamId team) const {
  if (team == kWorld) return num_ranks_;
  if (team == kGroup) return group_size_;
  const TeamRecord* record = FindTeam(*this, team);
  return record == nullptr ? 0 : static_cast<int>(record->size);
}

int Rank::PlaceIn(TeamId id, const char* operation) const {
  if (id == kWorld) return id_;
  if (id == kGroup) return id_ % group_size_;
  const TeamRecord* team = FindTeam(*this, id);
  if (team == nullptr) Fail(kind::kValue, operation, ": there is no team ", id);
  const uint8_t* end = team->ranks + team->size;
  const uint8_t* mine = std::find(team->ranks, end, id_);
  if (mine != end) return static_cast<int>(mine - team->ranks);
  Fail(kind::kValue, operation, ": rank ", id_, " is not in the team ", id);
}

const TeamRecord& Rank::Record(TeamId team) const {
  if (const TeamRecord* record = FindTeam(*this, team)) return *record;
  Fail(kind::kValue, "there is no team ", team,
       "; 0 is the world, 1 the group of the rank, and"
       " session.team(ranks) or tvm_ipc.team make others");
}

Meeting& Rank::Made(TeamId team) {
  const uint32_t index = static_cast<uint32_t>(team - kFirstTeam);
  if (index < kMaxTeams) {
    if (Meeting* known = made_[index].load(std::memory_order_acquire)) return *known;
  }
  const TeamRecord& record = Record(team);
  const std::vector<int> ranks(record.ranks, record.ranks + record.size);
  const std::vector<int> places(record.places, record.places + record.size);
  const int me = PlaceAmong(ranks, id_);
  const WaitPolicy wait = record.copy >= kCopiesOfWorks ? kWaitOfWorks : options_.wait;
  auto meeting = std::make_unique<Meeting>(control(), team, ranks, places, me, options_, wait);
  if (static_cast<size_t>(me) == ranks.size()) {
    Fail(kind::kValue, "rank ", id_, " called a collective", meeting->Where(),
         ", and is not a member of it");
  }
  Meeting* none = nullptr;
  if (made_[index].compare_exchange_strong(none, meeting.get(), std::memory_order_acq_rel)) {
    return *meeting.release();
  }
  return *none;  // another thread of the rank was first
}

uint32_t Rank::Ask(const std::string& question) const {
  std::lock_guard<std::mutex> lock(ask_mutex_);
  if (!connection_->Send(FrameType::kTeam, question)) {
    Fail(kind::kRuntime, "rank ", id_, " cannot ask for a team: it has no hub any more");
  }
  return ++asked_;
}

uint32_t Rank::CheckSession() const {
  Control& shared = control();
  // After the turn was taken: StartAgain, which sets abort back, looks for turns before that.
  if (shared.abort.load(std::memory_order_seq_cst) != 0) {
    Fail(kind::kPeer, "the operation was not started: ", DescribeAbort(shared));
  }
  const uint32_t generation = shared.generation.load(std::memory_order_acquire);
  if (shared_) CheckThread(generation);
  return generation;
}

void Rank::RequireOwnThread() const {
  if (!shared_ || acting.owner || acting.rank.get() != this) return;
  if (!backend_->capabilities().streams) return;
  Fail(kind::kRuntime, "this thread acts for rank ", id_, ", which has the backend ",
       backend_->name(), ": there only the worker's own thread does collectives, since they are",
       " started and not waited for, in one order on all ranks; call them in the function that the",
       " worker runs");
}

void Rank::CheckThread(uint32_t generation) const {
  if (left_->load()) Fail(kind::kPeer, "rank ", id_, " has left the session");
  if (acting.owner || acting.rank.get() != this || acting.generation == generation) return;
  Fail(kind::kPeer,
       "the session has recovered from an error since this thread began to act for"
       " rank ",
       id_, "; what it would do now belongs to what was given up");
}

void Rank::RequireAlone(const Busy& busy, const char* verb, int peer) const {
  if (!busy.refused()) return;
  Fail(kind::kRuntime, "two threads of rank ", id_, " ", verb, " rank ", peer,
       " at once; let them take turns");
}

Link Rank::BeginSend(int to) {
  Channel& channel = control().channel(id_, to);
  return BeginMessage("send to", to, channel, channel.sender_busy, sent_[to]);
}

Link Rank::BeginReceive(int from) {
  Channel& channel = control().channel(from, id_);
  return BeginMessage("receive from", from, channel, channel.receiver_busy, received_[from]);
}

Link Rank::BeginMessage(const char* verb, int peer, Channel& channel, std::atomic<uint32_t>& busy,
                        Packets& packets) {
  RequireOwnThread();
  if (!control().IsHere(peer)) FailElsewhere(Text("ranks ", id_, " and ", peer));
  Link link{Busy(shared_ ? &busy : nullptr), channel, packets.last};
  RequireAlone(link.busy, verb, peer);
  const uint32_t generation = CheckSession();
  if (packets.generation != generation) packets = {0, generation};
  return link;
}

uint8_t* Rank::arena_base() const { return segments_->base(id_) + ArenaStart(control()); }

int64_t Rank::OffsetOf(const void* data, size_t bytes) const {
  const auto* start = static_cast<const uint8_t*>(data);
  const uint8_t* base = segments_->base(id_);
  if (start < arena_base() || start + bytes > base + segments_->segment_bytes()) return -1;
  return start - base;
}

uint8_t* Rank::packet_buffer(int src, int dst, uint32_t packet) const {
  return segments_->base(src) + kPacketStart + (2 * dst + (packet & 1)) * kPacketBytes;
}

void Rank::FailSession() {
  control().ranks[id_].failed.store(1, std::memory_order_release);
  Abort(control(), AbortReason::kFailed, id_);
}

Rank* CurrentRank() { return acting.rank.get(); }

void SetCurrentRank(std::unique_ptr<Rank> rank) {
  acting.Stop();
  acting.owner = rank != nullptr;
  acting.rank = std::move(rank);
}

std::shared_ptr<Rank> ShareCurrentRank() {
  acting.rank->Share();
  return acting.rank;
}

void ActFor(std::shared_ptr<Rank> rank) {
  if (acting.rank != nullptr) {
    Fail(kind::kRuntime, "this thread acts for rank ", acting.rank->id(), " already");
  }
  acting.generation = rank->control().generation.load(std::memory_order_acquire);
  acting.rank = std::move(rank);
}

void StopActing() {
  if (acting.owner) Fail(kind::kRuntime, "this is the thread of the worker itself");
  acting.Stop();
}

void Abort(Control& control, AbortReason reason, int rank) {
  uint32_t none = 0;
  control.abort.compare_exchange_strong(none, AbortWord(reason, rank), std::memory_order_acq_rel);
  for (int r = 0; r < control.num_ranks; ++r) {
    for (uint32_t place = 0; place < control.num_seats(r); ++place) {
      Seat& seat = control.seats[place][r];
      if (seat.board.sleepers.load(std::memory_order_seq_cst) != 0) WakeAll(seat.board.last);
      if (seat.sleepers.load(std::memory_order_seq_cst) == 0) continue;
      for (Slot& slot : seat.slot) WakeAll(slot.seq);
    }
  }
}

bool Idle(Control& control) {
  auto busy = [](const std::atomic<uint32_t>& mark) {
    return mark.load(std::memory_order_seq_cst) != 0;
  };
  for (int r = 0; r < control.num_ranks; ++r) {
    for (uint32_t place = 0; place < control.num_seats(r); ++place) {
      if (busy(control.seats[place][r].busy)) return false;
    }
    for (int peer = 0; peer < control.num_ranks; ++peer) {
      const Channel& channel = control.channel(r, peer);
      if (busy(channel.sender_busy) || busy(channel.receiver_busy)) return false;
    }
  }
  return true;
}

void StartAgain(Control& control) {
  auto clear = [](Slot(&slots)[2]) {
    for (Slot& slot : slots) slot.seq.store(0, std::memory_order_relaxed);
  };
  for (int r = 0; r < control.num_ranks; ++r) {
    for (uint32_t place = 0; place < control.num_seats(r); ++place) {
      clear(control.seats[place][r].slot);
      control.seats[place][r].board.last.store(0, std::memory_order_relaxed);
    }
    for (int peer = 0; peer < control.num_ranks; ++peer) {
      Channel& channel = control.channel(r, peer);
      clear(channel.slot);
      channel.taken.store(0, std::memory_order_relaxed);
    }
    control.ranks[r].failed.store(0);
    control.ranks[r].exchanges.store(0);
  }
  control.generation.fetch_add(1, std::memory_order_release);
  control.abort.store(0, std::memory_order_seq_cst);
  if (control.wire_bytes != 0) Ring(control);
}

}  // namespace tvm_ipc
