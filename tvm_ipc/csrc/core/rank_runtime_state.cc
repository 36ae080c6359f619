/* SPDX-License-Identifier: Apache-2.0 */
/*! \file rank_runtime_state.cc */
#include "core/rank_runtime_state.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

#include "core/internode_request_queue.h"
#include "core/teams.h"
#include "core/thread_signals.h"

namespace tvm_ipc {

namespace {

/*! \brief Return `count` consecutive ranks. */
std::vector<int> Members(int first, int count) {
  std::vector<int> ranks(count);
  for (int i = 0; i < count; ++i) ranks[i] = first + i;
  return ranks;
}

/*! \brief Return the index of a rank in a list; the list's size if it is not there. */
int IndexIn(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

std::shared_ptr<Arena> MakeArena(const std::shared_ptr<Segments>& segments, File segment) {
  const size_t start = ArenaStart(segments->control());
  const size_t limit = segments->control().arena_bytes;
  // The file is closed and the memory unmapped with the last storage, not with the rank.
  auto file = std::make_shared<File>(std::move(segment));
  auto commit = [segments, start, file](size_t offset, size_t bytes) {
    BlockSignals blocked;  // a signal would interrupt the call and undo its work
    return fallocate(file->get(), 0, static_cast<off_t>(start + offset),
                     static_cast<off_t>(bytes)) == 0;
  };
  auto release = [start, file](size_t offset, size_t bytes) {
    fallocate(file->get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(start + offset), static_cast<off_t>(bytes));
  };
  return std::make_shared<Arena>(limit, commit, release);
}

/*! \brief The rank that a thread acts for, if any. */
struct Acting {
  std::shared_ptr<Rank> rank;
  /*! \brief Whether it is the worker's own thread, at whose end the rank leaves the session. */
  bool owner = false;
  /*! \brief The session's generation when the thread began to act. */
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
      user_teams_(new std::atomic<TeamBarrier*>[kMaxTeams]()),
      sent_(num_ranks_),
      received_(num_ranks_),
      arena_(MakeArena(segments, std::move(segment))) {}

Rank::~Rank() {
  async_queue_.reset();
  endpoint_.reset();
  Leave();
  for (uint32_t i = 0; i < kMaxTeams; ++i) delete user_teams_[i].load(std::memory_order_relaxed);
}

AsyncQueue& Rank::async_queue() {
  std::lock_guard<std::mutex> lock(async_queue_mutex_);
  if (async_queue_ == nullptr) async_queue_ = endpoint_->MakeAsyncQueue();
  if (async_queue_ == nullptr) async_queue_ = std::make_unique<ThreadAsyncQueue>(*this);
  return *async_queue_;
}

void Rank::Drain() {
  if (in_forked_child()) return;
  AsyncQueue* async_queue = nullptr;
  if (std::lock_guard<std::mutex> lock(async_queue_mutex_); true) async_queue = async_queue_.get();
  if (async_queue != nullptr) async_queue->Drain();
}

void Rank::Leave() {
  Drain();
  if (left_->exchange(true)) return;
  connection_->Send(FrameType::kBye, "");
}

OpGuard Rank::Begin(TeamId team) {
  RequireOwnThread();
  TeamBarrier& barrier = team == kWorld || (team == kGroup && group_size_ == num_ranks_) ? world_
                         : team == kGroup                                                ? group_
                                          : UserTeam(team);
  if (!barrier.here()) FailInternode(Text("the members of the team", barrier.Where()));
  return Acquire(barrier);
}

OpGuard Rank::BeginInternode(TeamId team) {
  RequireOwnThread();
  TeamBarrier* barrier = nullptr;
  if (std::lock_guard<std::mutex> lock(internode_mutex_); true) {
    std::unique_ptr<TeamBarrier>& barrier_of_team = internode_[team];
    if (barrier_of_team == nullptr) {
      if (team >= kFirstTeam) UserTeam(team);  // whether this rank is in it
      const std::vector<int> all = RanksOf(team);
      std::vector<int> ranks, slots;
      for (size_t i = 0; i < all.size(); ++i) {
        if (!control().IsHere(all[i])) continue;
        ranks.push_back(all[i]);
        slots.push_back(team < kFirstTeam ? static_cast<int>(team) : Record(team).slots[i]);
      }
      const bool is_async = team >= kFirstTeam && Record(team).copy >= kAsyncTeamCopies;
      barrier_of_team = std::make_unique<TeamBarrier>(
          control(), team, ranks, slots,
          static_cast<int>(std::find(ranks.begin(), ranks.end(), id_) - ranks.begin()), options_,
          is_async ? kAsyncWaitPolicy : options_.wait);
      barrier_of_team->NameRanks(all);
    }
    barrier = barrier_of_team.get();
  }
  return Acquire(*barrier);
}

OpGuard Rank::Acquire(TeamBarrier& barrier) {
  OpGuard guard{barrier, InUseFlag(shared_ ? &barrier.in_use() : nullptr)};
  if (guard.in_use.refused()) {
    Fail(kind::kRuntime, "two threads of rank ", id_, " are in a collective", barrier.Where(),
         " at the same time; give each thread its own team (another `copy` of the same ranks), or"
         " call the collectives one after the other");
  }
  barrier.Follow(CheckSession());
  return guard;
}

void Rank::FailInternode(const std::string& what) const {
  Fail(kind::kValue, what, " are on several nodes, and the backend ", backend_->name(),
       " moves data within one node only; use teams whose ranks are on one node");
}

int Rank::SizeOf(TeamId team) const {
  if (team == kWorld) return num_ranks_;
  if (team == kGroup) return group_size_;
  const TeamRecord* record = FindTeam(*this, team);
  return record == nullptr ? 0 : static_cast<int>(record->size);
}

std::vector<int> Rank::RanksOf(TeamId team) const {
  if (team < kFirstTeam) {
    const int size = SizeOf(team);
    std::vector<int> ranks(size);
    std::iota(ranks.begin(), ranks.end(), id_ / size * size);
    return ranks;
  }
  const TeamRecord& record = Record(team);
  return std::vector<int>(record.ranks, record.ranks + record.size);
}

int Rank::FindTeamIndex(TeamId id) const {
  if (id == kWorld) return id_;
  if (id == kGroup) return id_ % group_size_;
  const TeamRecord* team = FindTeam(*this, id);
  if (team == nullptr) return -1;
  const uint8_t* end = team->ranks + team->size;
  const uint8_t* mine = std::find(team->ranks, end, id_);
  return mine == end ? -1 : static_cast<int>(mine - team->ranks);
}

int Rank::TeamIndex(TeamId id, const char* operation) const {
  const int index = FindTeamIndex(id);
  if (index >= 0) return index;
  if (SizeOf(id) == 0) Fail(kind::kValue, operation, ": there is no team ", id);
  Fail(kind::kValue, operation, ": rank ", id_, " is not in the team ", id);
}

const TeamRecord& Rank::Record(TeamId team) const {
  if (const TeamRecord* record = FindTeam(*this, team)) return *record;
  Fail(kind::kValue, "there is no team ", team,
       "; 0 is the world, 1 is the rank's group, and"
       " session.team(ranks) or tvm_ipc.team create others");
}

TeamBarrier& Rank::UserTeam(TeamId team) {
  const uint32_t index = static_cast<uint32_t>(team - kFirstTeam);
  if (index < kMaxTeams) {
    if (TeamBarrier* barrier_of_team = user_teams_[index].load(std::memory_order_acquire))
      return *barrier_of_team;
  }
  const TeamRecord& record = Record(team);
  const std::vector<int> ranks(record.ranks, record.ranks + record.size);
  const std::vector<int> slots(record.slots, record.slots + record.size);
  const int me = IndexIn(ranks, id_);
  const WaitPolicy wait = record.copy >= kAsyncTeamCopies ? kAsyncWaitPolicy : options_.wait;
  auto barrier = std::make_unique<TeamBarrier>(control(), team, ranks, slots, me, options_, wait);
  if (static_cast<size_t>(me) == ranks.size()) {
    Fail(kind::kValue, "rank ", id_, " called a collective", barrier->Where(),
         ", and is not a member of it");
  }
  TeamBarrier* none = nullptr;
  if (user_teams_[index].compare_exchange_strong(none, barrier.get(), std::memory_order_acq_rel)) {
    return *barrier.release();
  }
  return *none;  // another thread of the rank was first
}

uint32_t Rank::SendTeamRequest(const std::string& request) const {
  std::lock_guard<std::mutex> lock(team_request_mutex_);
  if (!connection_->Send(FrameType::kTeam, request)) {
    Fail(kind::kRuntime, "rank ", id_,
         " cannot request a team: it has lost its connection to the"
         " session");
  }
  return ++team_requests_;
}

uint32_t Rank::CheckSession() const {
  Control& shared = control();
  // The in-use mark is set before this load. ResetSession clears `abort` only after it has seen
  // that no mark is set.
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
       backend_->name(), ": on it only the worker's own thread can call collectives, because they",
       " are asynchronous and must start in the same order on all ranks; call them in the function",
       " that the worker runs");
}

void Rank::CheckThread(uint32_t generation) const {
  if (left_->load()) Fail(kind::kPeer, "rank ", id_, " has left the session");
  if (acting.owner || acting.rank.get() != this || acting.generation == generation) return;
  Fail(kind::kPeer,
       "the session has recovered from an error since this thread began to act for"
       " rank ",
       id_, "; the work it was started for has been given up");
}

void Rank::RequireExclusive(const InUseFlag& in_use, const char* verb, int peer) const {
  if (!in_use.refused()) return;
  Fail(kind::kRuntime, "two threads of rank ", id_, " ", verb, " rank ", peer,
       " at the same time; let one wait for the other");
}

Link Rank::BeginSend(int to) {
  Channel& channel = control().channel(id_, to);
  return BeginMessage("send to", to, channel, channel.sender_in_use, sent_[to]);
}

Link Rank::BeginReceive(int from) {
  Channel& channel = control().channel(from, id_);
  return BeginMessage("receive from", from, channel, channel.receiver_in_use, received_[from]);
}

Link Rank::BeginMessage(const char* verb, int peer, Channel& channel, std::atomic<uint32_t>& in_use,
                        Packets& packets) {
  RequireOwnThread();
  if (!control().IsHere(peer)) FailInternode(Text("ranks ", id_, " and ", peer));
  Link link{InUseFlag(shared_ ? &in_use : nullptr), channel, packets.last};
  RequireExclusive(link.in_use, verb, peer);
  const uint32_t generation = CheckSession();
  if (packets.generation != generation) packets = {0, generation};
  return link;
}

RemoteLink Rank::BeginRemote(int peer, bool sends) {
  RequireOwnThread();
  Channel& channel = sends ? control().channel(id_, peer) : control().channel(peer, id_);
  RemoteLink link{InUseFlag(!shared_ ? nullptr
                            : sends  ? &channel.sender_in_use
                                     : &channel.receiver_in_use),
                  0};
  RequireExclusive(link.in_use, sends ? "send to" : "receive from", peer);
  link.generation = CheckSession();
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
    for (uint32_t slot = 0; slot < control.num_team_slots(r); ++slot) {
      TeamSlot& team_slot = control.team_slots[slot][r];
      if (team_slot.exposure_table.sleepers.load(std::memory_order_seq_cst) != 0)
        WakeAll(team_slot.exposure_table.last);
      if (team_slot.sleepers.load(std::memory_order_seq_cst) == 0) continue;
      for (Slot& slot : team_slot.slot) WakeAll(slot.seq);
    }
  }
}

bool IsIdle(Control& control) {
  auto in_use = [](const std::atomic<uint32_t>& mark) {
    return mark.load(std::memory_order_seq_cst) != 0;
  };
  for (int r = 0; r < control.num_ranks; ++r) {
    for (uint32_t slot = 0; slot < control.num_team_slots(r); ++slot) {
      if (in_use(control.team_slots[slot][r].in_use)) return false;
    }
    for (int peer = 0; peer < control.num_ranks; ++peer) {
      const Channel& channel = control.channel(r, peer);
      if (in_use(channel.sender_in_use) || in_use(channel.receiver_in_use)) return false;
    }
  }
  return true;
}

void ResetSession(Control& control) {
  auto clear = [](Slot(&slots)[2]) {
    for (Slot& slot : slots) slot.seq.store(0, std::memory_order_relaxed);
  };
  for (int r = 0; r < control.num_ranks; ++r) {
    for (uint32_t slot = 0; slot < control.num_team_slots(r); ++slot) {
      clear(control.team_slots[slot][r].slot);
      control.team_slots[slot][r].stalled.seq.store(0, std::memory_order_relaxed);
      control.team_slots[slot][r].exposure_table.last.store(0, std::memory_order_relaxed);
    }
    for (int peer = 0; peer < control.num_ranks; ++peer) {
      Channel& channel = control.channel(r, peer);
      clear(channel.slot);
      channel.taken.store(0, std::memory_order_relaxed);
    }
    control.ranks[r].failed.store(0);
    control.ranks[r].handle_all_gathers.store(0);
  }
  control.generation.fetch_add(1, std::memory_order_release);
  control.abort.store(0, std::memory_order_seq_cst);
  if (control.ring_bytes != 0) WakeEngine(control);
}

}  // namespace tvm_ipc
