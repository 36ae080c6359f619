/* SPDX-License-Identifier: Apache-2.0 */
/*! \file monitor.cc */
#include "core/monitor.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/forked.h"
#include "core/group.h"
#include "core/process.h"

namespace tvm_ipc {

namespace {

using About = NodeMessage::About;

std::chrono::duration<double> Seconds(double seconds) {
  return std::chrono::duration<double>(seconds);
}

void WaitUntilIdle(Control& control) {
  const auto end = std::chrono::steady_clock::now() + kIdleTime;
  while (!Idle(control)) {
    if (std::chrono::steady_clock::now() > end) {
      Fail(kind::kDeadline, "the session cannot recover: ", kNotIdle);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

Monitor::Monitor(Control& control)
    : control_(control), members_(control.num_ranks), exchange_(control.num_ranks) {}

Monitor::~Monitor() {
  for (Member& member : members_) {
    CloseKept(member.socket);
    if (member.process >= 0) close(member.process);
  }
}

void Monitor::Add(int rank, int pid, int socket) {
  std::lock_guard<std::mutex> lock(mutex_);
  Member& member = members_[rank];
  member.socket = socket;
  member.greeted = true;
  member.pid = pid;
  if (pid != getpid()) member.process = OpenProcess(pid);
  Say(About::kGreeted, rank, static_cast<uint64_t>(pid));
  changed_.notify_all();
}

void Monitor::Remove(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (members_[rank].process >= 0) close(members_[rank].process);
  members_[rank] = Member();
  Say(About::kLeft, rank);
}

void Monitor::Refuse(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  Say(About::kRefused, -1, 0, reason);
  refusals_.push_back(reason);
  changed_.notify_all();
}

void Monitor::Watch(std::vector<pollfd>* polled, bool hear) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Member& member : members_) {
    const int events = (hear ? POLLIN : 0) | (member.outgoing.empty() ? 0 : POLLOUT);
    if (member.socket >= 0) polled->push_back({member.socket, static_cast<short>(events), 0});
    if (member.process >= 0) polled->push_back({member.process, POLLIN, 0});
  }
}

void Monitor::Serve(const pollfd& ready) {
  for (Member& member : members_) {
    if (ready.fd == member.process) {
      // What the process sent before it ended is still to be read from its socket.
      do Hear(member);
      while (member.socket >= 0 && !member.said.drained());
      Leave(member, true);
    } else if (ready.fd == member.socket) {
      if (ready.revents & POLLOUT) Tell(member);
      if (ready.revents & ~POLLOUT) Hear(member);
    }
  }
}

void Monitor::Hear(Member& member) {
  if (member.socket < 0) return;
  const bool more = member.said.Read(member.socket);
  const bool nonsense = !more && errno == EPROTO;
  Frame frame;
  while (member.socket >= 0 && member.said.Next(&frame)) Handle(member, std::move(frame));
  if (more || member.socket < 0) return;
  if (nonsense) {
    std::lock_guard<std::mutex> lock(mutex_);
    FailRank(RankOf(member), "what the rank sent to the controller is no frame of this library");
  }
  Leave(member, true);  // without a goodbye among its last frames
}

void Monitor::Tell(Member& member) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (member.outgoing.Send(member.socket)) return;
  const int error = errno;
  member.outgoing = Outgoing();
  if (error == EPIPE || error == ECONNRESET) return;  // it has ended, as will be heard
  FailRank(RankOf(member), Text("what the ranks show each other could not be sent: ",
                                strerror(error), error == ETOOMANYREFS ? kMoreFiles : ""));
}

void Monitor::Handle(Member& member, Frame frame) {
  if (frame.type == FrameType::kBye) return Leave(member, false);
  std::lock_guard<std::mutex> lock(mutex_);
  const int rank = RankOf(member);
  uint64_t ticket = 0;
  if (frame.payload.size() >= sizeof(ticket)) memcpy(&ticket, frame.payload.data(), sizeof(ticket));
  switch (frame.type) {
    case FrameType::kJoined:
      member.joined = true;
      if (!frame.payload.empty()) instead_ = frame.payload;
      Say(About::kJoined, rank, 0, frame.payload);
      break;
    case FrameType::kDone:
      member.done = std::max(member.done, ticket);
      Say(About::kDone, rank, ticket);
      break;
    case FrameType::kValue:
      if (frame.payload.size() < sizeof(ticket)) break;
      if (!say_) {
        TakeValueIn(ticket, frame.payload.substr(sizeof(ticket)));
      } else if (frame.payload.size() > kLargestMessage / 2) {
        FailRank(rank, Text("a value of ", frame.payload.size(),
                            " bytes is too large to be fetched"
                            " from another node, which ",
                            kLargestMessage / 2, " may have"));
      } else {
        Say(About::kValue, rank, ticket, frame.payload.substr(sizeof(ticket)));
      }
      break;
    case FrameType::kTeam:
      if (frame.payload.size() < sizeof(ticket)) break;
      Say(About::kTeam, rank, ticket, frame.payload.substr(sizeof(ticket)));
      break;
    case FrameType::kError: {
      RankReport report;
      if (!UnpackReport(rank, frame.payload, &report)) {
        FailRank(rank, "what the rank reported is no report of this library");
        break;
      }
      errors_.push_back(std::move(report));
      Say(About::kError, rank, 0, frame.payload);
      // As the rank itself is about to do, in which it wakes nobody here.
      if (say_ && member.joined) Abort(control_, AbortReason::kFailed, rank);
      break;
    }
    case FrameType::kShared:
      if (frame.lost_files) {
        FailRank(rank,
                 Text("the controller has no descriptors for what the rank shows", kMoreFiles));
        break;
      }
      for (const auto& message : exchange_.Add(rank, std::move(frame))) {
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

void Monitor::Leave(Member& member, bool dead) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (member.left) return;
  member.left = true;
  member.dead = dead;
  CloseKept(member.socket);
  if (member.process >= 0) close(member.process);
  member.socket = member.process = -1;
  member.outgoing = Outgoing();
  if (dead) Abort(control_, AbortReason::kDied, RankOf(member));
  Say(dead ? About::kDied : About::kLeft, RankOf(member));
  changed_.notify_all();
}

void Monitor::FailRank(int rank, const std::string& message) {
  errors_.push_back(RankReport{rank, kind::kRuntime, message, ""});
  Say(About::kError, rank, 0, PackError(kind::kRuntime, message, ""));
  Abort(control_, AbortReason::kFailed, rank);
  changed_.notify_all();
}

bool Monitor::WaitJoined(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto all_joined = [this] {
    return std::all_of(members_.begin(), members_.end(),
                       [this](const Member& m) { return m.joined || !Mine(m); });
  };
  auto over = [&] {
    return all_joined() || !refusals_.empty() || !errors_.empty() ||
           std::any_of(members_.begin(), members_.end(), [](const Member& m) { return m.dead; });
  };
  changed_.wait_for(lock, Seconds(seconds), over);
  return all_joined();
}

void Monitor::ReportError(RankReport error) {
  std::lock_guard<std::mutex> lock(mutex_);
  errors_.push_back(std::move(error));
  changed_.notify_all();
}

Monitor::Progress Monitor::WaitDone(uint64_t ticket, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto done = [&] {
    return std::all_of(members_.begin(), members_.end(),
                       [&](const Member& m) { return m.done >= ticket || !Mine(m); });
  };
  auto lost = [&] {
    return std::any_of(members_.begin(), members_.end(), [](const Member& m) { return m.left; });
  };
  changed_.wait_for(lock, Seconds(seconds), [&] { return done() || lost(); });
  if (lost()) return Progress::kAttention;
  if (!done()) return Progress::kPending;  // an error is told when every rank has come to rest
  return errors_.empty() ? Progress::kDone : Progress::kAttention;
}

bool Monitor::WaitLeft(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, Seconds(seconds), [this] {
    return std::all_of(members_.begin(), members_.end(),
                       [](const Member& m) { return m.left || !m.greeted; });
  });
}

bool Monitor::finished() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(members_.begin(), members_.end(),
                     [this](const Member& m) { return m.left || !Mine(m); });
}

SessionReport Monitor::Report() {
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
  report.changed = instead_;
  report.lost = lost_;
  return report;
}

void Monitor::WantValue(uint64_t key) {
  std::lock_guard<std::mutex> lock(mutex_);
  values_[key];
}

std::string Monitor::TakeValue(uint64_t key) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = values_.find(key);
  if (it == values_.end()) return "";
  std::string value = std::move(it->second);
  values_.erase(it);
  return value;
}

void Monitor::Recover() {
  WaitUntilIdle(control_);
  std::unique_lock<std::mutex> lock(mutex_);
  if (control_.num_nodes > 0) RecoverNodes(lock);
  Begin();
}

void Monitor::Begin() {
  errors_.clear();
  exchange_.Clear();
  for (Member& member : members_) member.outgoing.Clear();
  StartAgain(control_);
  const Ended coming = std::exchange(coming_, Ended());
  if (coming.word == 0 || coming.generation != control_.generation.load()) return;
  Abort(control_, static_cast<AbortReason>(coming.word & 0xff), static_cast<int>(coming.word >> 8));
  wake_();  // others are to be told
}

void Monitor::TakeValueIn(uint64_t key, std::string value) {
  if (auto wanted = values_.find(key); wanted != values_.end()) wanted->second = std::move(value);
}

bool Monitor::UnpackReport(int rank, const std::string& payload, RankReport* report) {
  report->rank = rank;
  size_t position = 0;
  return TakeField(payload, &position, &report->kind) &&
         TakeField(payload, &position, &report->message) &&
         TakeField(payload, &position, &report->traceback);
}

}  // namespace tvm_ipc
