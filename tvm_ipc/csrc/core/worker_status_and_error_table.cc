/* SPDX-License-Identifier: Apache-2.0 */
/*! \file worker_status_and_error_table.cc */
#include "core/worker_status_and_error_table.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "core/atfork_descriptors.h"
#include "core/error.h"
#include "core/rank_runtime_state.h"
#include "core/thread_signals.h"

namespace tvm_ipc {

namespace {

using Type = NodeMessage::Type;

std::chrono::duration<double> Seconds(double seconds) {
  return std::chrono::duration<double>(seconds);
}

void WaitUntilIdle(Control& control) {
  const auto end = std::chrono::steady_clock::now() + kIdleTime;
  while (!IsIdle(control)) {
    if (std::chrono::steady_clock::now() > end) {
      Fail(kind::kDeadline, "the session cannot recover: ", kNotIdle);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool Answered(const std::vector<bool>& answered) {
  return std::find(answered.begin(), answered.end(), false) == answered.end();
}

}  // namespace

WorkerTable::WorkerTable(Control& control)
    : control_(control), members_(control.num_ranks), handle_all_gather_(control.num_ranks) {}

WorkerTable::~WorkerTable() {
  for (Member& member : members_) {
    CloseKept(member.socket);
    if (member.process >= 0) close(member.process);
  }
}

void WorkerTable::Add(int rank, int pid, int socket) {
  std::lock_guard<std::mutex> lock(mutex_);
  Member& member = members_[rank];
  member.socket = socket;
  member.greeted = true;
  member.pid = pid;
  if (pid != getpid()) member.process = OpenProcess(pid);
  Notify(Type::kGreeted, rank, static_cast<uint64_t>(pid));
  changed_.notify_all();
}

void WorkerTable::Remove(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (members_[rank].process >= 0) close(members_[rank].process);
  members_[rank] = Member();
  Notify(Type::kLeft, rank);
}

void WorkerTable::Refuse(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  Notify(Type::kRefused, -1, 0, reason);
  refusals_.push_back(reason);
  changed_.notify_all();
}

void WorkerTable::Watch(std::vector<pollfd>* polled, bool receive) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Member& member : members_) {
    const int events = (receive ? POLLIN : 0) | (member.outgoing.empty() ? 0 : POLLOUT);
    if (member.socket >= 0) polled->push_back({member.socket, static_cast<short>(events), 0});
    if (member.process >= 0) polled->push_back({member.process, POLLIN, 0});
  }
}

void WorkerTable::Serve(const pollfd& ready) {
  for (Member& member : members_) {
    if (ready.fd == member.process) {
      // What the process sent before it ended is still to be read from its socket.
      do Receive(member);
      while (member.socket >= 0 && !member.incoming.drained());
      Leave(member, true);
    } else if (ready.fd == member.socket) {
      if (ready.revents & POLLOUT) Flush(member);
      if (ready.revents & ~POLLOUT) Receive(member);
    }
  }
}

void WorkerTable::Receive(Member& member) {
  if (member.socket < 0) return;
  const bool more = member.incoming.Read(member.socket);
  const bool invalid = !more && errno == EPROTO;
  Frame frame;
  while (member.socket >= 0 && member.incoming.Next(&frame)) Handle(member, std::move(frame));
  if (more || member.socket < 0) return;
  if (invalid) {
    std::lock_guard<std::mutex> lock(mutex_);
    FailRank(RankOf(member),
             "the controller cannot read the rank's message, which is no frame of this library");
  }
  Leave(member, true);  // the connection ended without a goodbye
}

void WorkerTable::Flush(Member& member) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (member.outgoing.Send(member.socket)) return;
  const int error = errno;
  member.outgoing = Outgoing();
  if (error == EPIPE || error == ECONNRESET) return;  // the worker has ended; `Receive` reports it
  FailRank(RankOf(member), Text("the memory handles of its peers could not be sent: ",
                                strerror(error), error == ETOOMANYREFS ? kMoreFiles : ""));
}

void WorkerTable::Handle(Member& member, Frame frame) {
  if (frame.type == FrameType::kBye) return Leave(member, false);
  std::lock_guard<std::mutex> lock(mutex_);
  const int rank = RankOf(member);
  uint64_t ticket = 0;
  if (frame.payload.size() >= sizeof(ticket)) memcpy(&ticket, frame.payload.data(), sizeof(ticket));
  switch (frame.type) {
    case FrameType::kJoined:
      member.joined = true;
      if (!frame.payload.empty()) fallback_ = frame.payload;
      Notify(Type::kJoined, rank, 0, frame.payload);
      break;
    case FrameType::kDone:
      member.done = std::max(member.done, ticket);
      Notify(Type::kDone, rank, ticket);
      break;
    case FrameType::kValue:
      if (frame.payload.size() < sizeof(ticket)) break;
      if (!notify_) {
        StoreValue(ticket, frame.payload.substr(sizeof(ticket)));
      } else if (frame.payload.size() > kLargestMessage / 2) {
        FailRank(rank, Text("a value of ", frame.payload.size(),
                            " bytes is too large to be fetched from another node; the limit is ",
                            kLargestMessage / 2, " bytes"));
      } else {
        Notify(Type::kValue, rank, ticket, frame.payload.substr(sizeof(ticket)));
      }
      break;
    case FrameType::kTeam:
      if (frame.payload.size() < sizeof(ticket)) break;
      Notify(Type::kTeam, rank, ticket, frame.payload.substr(sizeof(ticket)));
      break;
    case FrameType::kError: {
      RankReport report;
      if (!UnpackReport(rank, frame.payload, &report)) {
        FailRank(rank, "the rank's error report cannot be read");
        break;
      }
      errors_.push_back(std::move(report));
      Notify(Type::kError, rank, 0, frame.payload);
      // The rank is about to abort as well, but does not wake this process.
      if (notify_ && member.joined) Abort(control_, AbortReason::kFailed, rank);
      break;
    }
    case FrameType::kShared:
      if (frame.lost_files) {
        FailRank(rank, Text("the controller has no descriptors for the rank's memory handles",
                            kMoreFiles));
        break;
      }
      for (const auto& message : handle_all_gather_.Add(rank, std::move(frame))) {
        for (Member& other : members_) {
          if (other.socket >= 0) other.outgoing.Add(message);
        }
      }
      break;
    default:
      break;
  }
  changed_.notify_all();
}

void WorkerTable::Leave(Member& member, bool dead) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (member.left) return;
  member.left = true;
  member.dead = dead;
  CloseKept(member.socket);
  if (member.process >= 0) close(member.process);
  member.socket = member.process = -1;
  member.outgoing = Outgoing();
  if (dead) Abort(control_, AbortReason::kDied, RankOf(member));
  Notify(dead ? Type::kDied : Type::kLeft, RankOf(member));
  changed_.notify_all();
}

void WorkerTable::FailRank(int rank, const std::string& message) {
  errors_.push_back(RankReport{rank, kind::kRuntime, message, ""});
  Notify(Type::kError, rank, 0, PackError(kind::kRuntime, message, ""));
  Abort(control_, AbortReason::kFailed, rank);
  changed_.notify_all();
}

bool WorkerTable::WaitJoined(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto all_joined = [this] {
    return std::all_of(members_.begin(), members_.end(),
                       [this](const Member& m) { return m.joined || !IsLocal(m); });
  };
  auto over = [&] {
    return all_joined() || !refusals_.empty() || !errors_.empty() ||
           std::any_of(members_.begin(), members_.end(), [](const Member& m) { return m.dead; });
  };
  changed_.wait_for(lock, Seconds(seconds), over);
  return all_joined();
}

void WorkerTable::ReportError(RankReport error) {
  std::lock_guard<std::mutex> lock(mutex_);
  errors_.push_back(std::move(error));
  changed_.notify_all();
}

WorkerTable::Progress WorkerTable::WaitDone(uint64_t ticket, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto done = [&] {
    return std::all_of(members_.begin(), members_.end(),
                       [&](const Member& m) { return m.done >= ticket || !IsLocal(m); });
  };
  auto lost = [&] {
    return std::any_of(members_.begin(), members_.end(), [](const Member& m) { return m.left; });
  };
  changed_.wait_for(lock, Seconds(seconds), [&] { return done() || lost(); });
  if (lost()) return Progress::kAttention;
  if (!done()) return Progress::kPending;  // errors are reported once every rank is idle
  return errors_.empty() ? Progress::kDone : Progress::kAttention;
}

bool WorkerTable::WaitLeft(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, Seconds(seconds), [this] {
    return std::all_of(members_.begin(), members_.end(),
                       [](const Member& m) { return m.left || !m.greeted; });
  });
}

bool WorkerTable::finished() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(members_.begin(), members_.end(),
                     [this](const Member& m) { return m.left || !IsLocal(m); });
}

SessionReport WorkerTable::Report() {
  std::lock_guard<std::mutex> lock(mutex_);
  SessionReport report;
  for (const Member& member : members_) {
    if (member.joined) report.joined.push_back(RankOf(member));
    if (member.dead) report.dead.push_back(RankOf(member));
    if (member.left && !member.dead) report.left.push_back(RankOf(member));
    report.pids.push_back(member.pid);
    report.done.push_back(member.done);
  }
  report.errors = errors_;
  report.refusals = refusals_;
  report.changed = fallback_;
  report.lost = lost_;
  return report;
}

void WorkerTable::ExpectValue(uint64_t key) {
  std::lock_guard<std::mutex> lock(mutex_);
  values_[key];
}

std::string WorkerTable::TakeValue(uint64_t key) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = values_.find(key);
  if (it == values_.end()) return "";
  std::string value = std::move(it->second);
  values_.erase(it);
  return value;
}

void WorkerTable::Recover() {
  WaitUntilIdle(control_);
  std::unique_lock<std::mutex> lock(mutex_);
  if (control_.num_nodes > 0) RecoverNodes(lock);
  BeginGeneration();
}

void WorkerTable::BeginGeneration() {
  errors_.clear();
  handle_all_gather_.Clear();
  for (Member& member : members_) member.outgoing.Clear();
  ResetSession(control_);
  const AbortRecord incoming = std::exchange(pending_abort_, AbortRecord());
  if (incoming.word == 0 || incoming.generation != control_.generation.load()) return;
  Abort(control_, ReasonOf(incoming.word), SubjectOf(incoming.word));
  wake_();  // the other nodes must learn of it
}

void WorkerTable::StoreValue(uint64_t key, std::string value) {
  if (auto wanted = values_.find(key); wanted != values_.end()) wanted->second = std::move(value);
}

bool WorkerTable::UnpackReport(int rank, const std::string& payload, RankReport* report) {
  report->rank = rank;
  size_t position = 0;
  return TakeField(payload, &position, &report->kind) &&
         TakeField(payload, &position, &report->message) &&
         TakeField(payload, &position, &report->traceback);
}

// ---- Sessions of several nodes (internode_session_event_relay.h).

void WorkerTable::Notify(Type type, int rank, uint64_t number, std::string text) {
  if (notify_) notify_({type, rank, number, std::move(text)});
}

bool WorkerTable::HandleNodeMessage(int node, NodeMessage message) {
  if (message.type == Type::kLeft || message.type == Type::kDied) {
    if (control_.NodeOf(message.rank) != node) return false;
    Leave(members_[message.rank], message.type == Type::kDied);
    return true;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const bool ok = ApplyNodeMessage(node, std::move(message));
  changed_.notify_all();
  return ok;
}

bool WorkerTable::ApplyNodeMessage(int node, NodeMessage message) {
  if (message.type == Type::kRefused) {
    refusals_.push_back(Text("node ", control_.nodes[node].name, ": ", message.text));
    return true;
  }
  if (message.type == Type::kRecovered) {
    if (message.number != wanted_generation_ || recovered_.empty() || recovered_[node])
      return false;
    recovered_[node] = true;
    if (!message.text.empty())
      not_recovered_ = Text("node ", control_.nodes[node].name, ": ", message.text);
    return true;
  }
  if (control_.NodeOf(message.rank) != node) return false;
  Member& member = members_[message.rank];
  switch (message.type) {
    case Type::kGreeted:
      member.greeted = true;
      member.pid = static_cast<int>(message.number);
      control_.ranks[message.rank].pid.store(member.pid, std::memory_order_relaxed);
      return true;
    case Type::kJoined:
      member.joined = true;
      if (!message.text.empty()) fallback_ = message.text;
      return true;
    case Type::kDone:
      member.done = std::max(member.done, message.number);
      return true;
    case Type::kValue:
      StoreValue(message.number, std::move(message.text));
      return true;
    case Type::kError: {
      RankReport report;
      if (!UnpackReport(message.rank, message.text, &report)) return false;
      errors_.push_back(std::move(report));
      return true;
    }
    default:
      return false;
  }
}

bool WorkerTable::HandleNodeAbort(int node, uint32_t generation, uint32_t word, int pid) {
  const AbortReason reason = ReasonOf(word);
  const int subject = SubjectOf(word);
  const bool of_rank = reason == AbortReason::kFailed || reason == AbortReason::kDied;
  const bool of_node = reason == AbortReason::kNodeLost;
  std::lock_guard<std::mutex> lock(mutex_);
  if (of_rank && control_.NodeOf(subject) < 0) return false;
  if (of_node && (subject < 0 || subject >= control_.num_nodes)) return false;
  if (notify_) {  // this is a node, and the sender is the controller
    if (!of_rank && !of_node && reason != AbortReason::kClosed) return false;
  } else if (!of_rank || control_.NodeOf(subject) != node) {
    return false;  // a node may only report its own ranks
  }
  if (of_rank && !control_.IsHere(subject)) {
    control_.ranks[subject].pid.store(pid, std::memory_order_relaxed);
  }
  const uint32_t now = control_.generation.load(std::memory_order_acquire);
  if (generation > now) {
    pending_abort_ = {generation, word, 0};
  } else if (generation == now) {
    Abort(control_, reason, subject);
  }
  changed_.notify_all();
  return true;
}

WorkerTable::AbortRecord WorkerTable::CurrentAbort() {
  std::lock_guard<std::mutex> lock(mutex_);
  AbortRecord record;
  record.word = control_.abort.load(std::memory_order_acquire);
  record.generation = control_.generation.load(std::memory_order_acquire);
  const AbortReason reason = ReasonOf(record.word);
  if (reason == AbortReason::kFailed || reason == AbortReason::kDied) {
    record.pid = control_.ranks[SubjectOf(record.word)].pid.load(std::memory_order_relaxed);
  }
  if (reason == AbortReason::kControllerLost) record.word = 0;  // no node is connected
  return record;
}

void WorkerTable::LoseNode(int node, const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  const NodeRecord& record = control_.nodes[node];
  bool lost = false;
  for (int rank = record.first; rank < record.first + record.ranks; ++rank) {
    Member& member = members_[rank];
    lost = lost || !member.left;
    if (!member.left) member.dead = true;
    member.left = true;
  }
  if (!lost) return;  // all its ranks have left
  lost_.push_back(Text(DescribeNode(control_, node), " is lost: ", why));
  Abort(control_, AbortReason::kNodeLost, node);
  changed_.notify_all();
}

void WorkerTable::LoseController(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  lost_.push_back(Text("the controller is lost: ", why));
  Abort(control_, AbortReason::kControllerLost, 0);
  changed_.notify_all();
}

uint32_t WorkerTable::wanted_generation(uint64_t* request) {
  std::lock_guard<std::mutex> lock(mutex_);
  *request = recovery_request_;
  return wanted_generation_;
}

bool WorkerTable::BeginIfIdle() {
  if (!IsIdle(control_)) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  BeginGeneration();
  return true;
}

void WorkerTable::RecoverNodes(std::unique_lock<std::mutex>& lock) {
  if (!lost_.empty()) Fail(kind::kRuntime, "the session cannot recover: ", lost_.front());
  wanted_generation_ = control_.generation.load() + 1;
  ++recovery_request_;
  recovered_.assign(control_.num_nodes, false);
  // A node has kIdleTime to become idle, and answers with an error if it needs longer.
  const auto patience = kIdleTime + std::chrono::seconds(30);
  wake_();
  const bool answered = changed_.wait_for(lock, patience, [this] {
    return Answered(recovered_) || !not_recovered_.empty() || !lost_.empty();
  });
  wanted_generation_ = 0;
  recovered_.clear();
  const std::string why = std::exchange(not_recovered_, "");
  if (!lost_.empty()) Fail(kind::kRuntime, "the session cannot recover: ", lost_.front());
  if (!why.empty()) Fail(kind::kDeadline, "the session cannot recover: ", why);
  if (!answered) Fail(kind::kDeadline, "the session cannot recover: a node does not answer");
}

}  // namespace tvm_ipc
