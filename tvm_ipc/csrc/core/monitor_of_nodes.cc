/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file monitor_of_nodes.cc
 * \brief The monitor of a session of several nodes: the controller's hears of the ranks of all of
 *        them from their hubs, a node's tells what it hears.
 */
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/group.h"
#include "core/monitor.h"

namespace tvm_ipc {

namespace {

using About = NodeMessage::About;

bool Answered(const std::vector<bool>& answered) {
  return std::find(answered.begin(), answered.end(), false) == answered.end();
}

}  // namespace

void Monitor::Say(About about, int rank, uint64_t number, std::string text) {
  if (say_) say_({about, rank, number, std::move(text)});
}

bool Monitor::HearNode(int node, NodeMessage message) {
  if (message.about == About::kLeft || message.about == About::kDied) {
    if (control_.NodeOf(message.rank) != node) return false;
    Leave(members_[message.rank], message.about == About::kDied);
    return true;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const bool ok = HearOfNode(node, std::move(message));
  changed_.notify_all();
  return ok;
}

bool Monitor::HearOfNode(int node, NodeMessage message) {
  if (message.about == About::kRefused) {
    refusals_.push_back(Text("node ", control_.nodes[node].name, ": ", message.text));
    return true;
  }
  if (message.about == About::kRecovered) {
    if (message.number != wanted_generation_ || recovered_.empty() || recovered_[node])
      return false;
    recovered_[node] = true;
    if (!message.text.empty())
      not_recovered_ = Text("node ", control_.nodes[node].name, ": ", message.text);
    return true;
  }
  if (control_.NodeOf(message.rank) != node) return false;
  Member& member = members_[message.rank];
  switch (message.about) {
    case About::kGreeted:
      member.greeted = true;
      member.pid = static_cast<int>(message.number);
      control_.ranks[message.rank].pid.store(member.pid, std::memory_order_relaxed);
      return true;
    case About::kJoined:
      member.joined = true;
      if (!message.text.empty()) instead_ = message.text;
      return true;
    case About::kDone:
      member.done = std::max(member.done, message.number);
      return true;
    case About::kValue:
      TakeValueIn(message.number, std::move(message.text));
      return true;
    case About::kError: {
      RankReport report;
      if (!UnpackReport(message.rank, message.text, &report)) return false;
      errors_.push_back(std::move(report));
      return true;
    }
    default:
      return false;
  }
}

bool Monitor::HearAbort(int node, uint32_t generation, uint32_t word, int pid) {
  const auto reason = static_cast<AbortReason>(word & 0xff);
  const int about = static_cast<int>(word >> 8);
  const bool of_rank = reason == AbortReason::kFailed || reason == AbortReason::kDied;
  const bool of_node = reason == AbortReason::kNodeLost;
  std::lock_guard<std::mutex> lock(mutex_);
  if (of_rank && control_.NodeOf(about) < 0) return false;
  if (of_node && (about < 0 || about >= control_.num_nodes)) return false;
  if (say_) {  // on a node, of the controller
    if (!of_rank && !of_node && reason != AbortReason::kClosed) return false;
  } else if (!of_rank || control_.NodeOf(about) != node) {
    return false;  // a node knows of its own ranks
  }
  if (of_rank && !control_.IsHere(about)) {
    control_.ranks[about].pid.store(pid, std::memory_order_relaxed);
  }
  const uint32_t now = control_.generation.load(std::memory_order_acquire);
  if (generation > now) {
    coming_ = {generation, word, 0};
  } else if (generation == now) {
    Abort(control_, reason, about);
  }
  changed_.notify_all();
  return true;
}

Monitor::Ended Monitor::WhatEnded() {
  std::lock_guard<std::mutex> lock(mutex_);
  Ended ended;
  ended.word = control_.abort.load(std::memory_order_acquire);
  ended.generation = control_.generation.load(std::memory_order_acquire);
  const auto reason = static_cast<AbortReason>(ended.word & 0xff);
  if (reason == AbortReason::kFailed || reason == AbortReason::kDied) {
    ended.pid = control_.ranks[ended.word >> 8].pid.load(std::memory_order_relaxed);
  }
  if (reason == AbortReason::kControllerLost) ended.word = 0;  // there is nobody to tell
  return ended;
}

void Monitor::LoseNode(int node, const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  const NodeRecord& record = control_.nodes[node];
  bool lost = false;
  for (int rank = record.first; rank < record.first + record.ranks; ++rank) {
    Member& member = members_[rank];
    lost = lost || !member.left;
    if (!member.left) member.dead = true;
    member.left = true;
  }
  if (!lost) return;  // all said goodbye
  lost_.push_back(Text(DescribeNode(control_, node), " is lost: ", why));
  Abort(control_, AbortReason::kNodeLost, node);
  changed_.notify_all();
}

void Monitor::LoseController(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  lost_.push_back(Text("the controller is lost: ", why));
  Abort(control_, AbortReason::kControllerLost, 0);
  changed_.notify_all();
}

uint32_t Monitor::wanted_generation(uint64_t* request) {
  std::lock_guard<std::mutex> lock(mutex_);
  *request = request_;
  return wanted_generation_;
}

bool Monitor::BeginIfIdle() {
  if (!Idle(control_)) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  Begin();
  return true;
}

void Monitor::RecoverNodes(std::unique_lock<std::mutex>& lock) {
  if (!lost_.empty()) Fail(kind::kRuntime, "the session cannot recover: ", lost_.front());
  wanted_generation_ = control_.generation.load() + 1;
  ++request_;
  recovered_.assign(control_.num_nodes, false);
  // A node may take its time to be idle, and says so if it takes more.
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
