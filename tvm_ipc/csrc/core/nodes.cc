/* SPDX-License-Identifier: Apache-2.0 */
/*! \file nodes.cc */
#include "core/nodes.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/teams.h"
#include "core/wait.h"

namespace tvm_ipc {

namespace {

using About = NodeMessage::About;
using Clock = std::chrono::steady_clock;

}  // namespace

Nodes::Nodes(Control& control, Monitor& monitor, int here, const LinkTimes& times)
    : control_(control), monitor_(monitor), here_(here), times_(times) {
  if (here_ < 0) return;
  monitor_.SayTo([this](NodeMessage message) {
    if (up_ != nullptr) {
      up_->link.Send(message);
    } else if (!control_.abort.load()) {
      unsaid_.push_back(std::move(message));
    }
  });
}

void Nodes::Attach(int node, File socket) {
  std::lock_guard<std::mutex> lock(mutex_);
  new_.emplace_back(node, std::move(socket));
}

void Nodes::TakeNew() {
  std::vector<std::pair<int, File>> taken;
  if (std::lock_guard<std::mutex> lock(mutex_); true) taken.swap(new_);
  for (auto& [node, socket] : taken) {
    // The controller speaks when all nodes are there; that it lives is the agent's to see until
    // then.
    others_.push_back(std::make_unique<Other>(node, std::move(socket), times_, here_ >= 0));
    if (here_ < 0) continue;
    up_ = others_.back().get();
    for (const NodeMessage& message : unsaid_) up_->link.Send(message);
    unsaid_.clear();
  }
}

int Nodes::Watch(std::vector<pollfd>* polled) {
  for (const auto& other : others_) other->link.Watch(polled);
  return others_.empty() ? -1 : patience_;
}

void Nodes::Serve(const pollfd& ready) {
  for (const auto& other : others_) {
    if (other->link.socket() != ready.fd) continue;
    if (ready.revents & ~POLLOUT) other->link.Hear();
    NodeMessage message;
    while (other->link.Next(&message)) {
      if (Handle(*other, std::move(message))) continue;
      other->link.GiveUp("it said what it may not say, or not now");
      break;
    }
  }
}

bool Nodes::Handle(Other& other, NodeMessage message) {
  if (message.about == About::kAbort) {
    const auto generation = static_cast<uint32_t>(message.number >> 32);
    const auto word = static_cast<uint32_t>(message.number);
    if (!other.told || other.told_generation < generation) {
      other.told = true;
      other.told_generation = generation;
    }
    return monitor_.HearAbort(other.node, generation, word, message.rank);
  }
  if (message.about == About::kTeam || message.about == About::kTeamsSaid) {
    return HandleTeam(other, message);
  }
  if (here_ < 0) return monitor_.HearNode(other.node, std::move(message));
  return message.about == About::kRecover && HandleRecover(message);
}

bool Nodes::HandleTeam(Other& other, const NodeMessage& message) {
  if (here_ < 0) return message.about == About::kTeam && HandleQuestion(other, message);
  if (message.about == About::kTeam) {
    try {
      return TeamOf(control_, UnpackRanks(message.text), static_cast<uint32_t>(message.number)) ==
             static_cast<TeamId>(message.number >> 32);
    } catch (const Error&) {
      return false;
    }
  }
  if (!control_.IsHere(message.rank)) return false;
  RankState& state = control_.ranks[message.rank];
  Publish(state.answers, state.answers.load(std::memory_order_relaxed) + 1, state.answers_sleepers);
  return true;
}

bool Nodes::HandleQuestion(Other& other, const NodeMessage& message) {
  if (control_.NodeOf(message.rank) != other.node) return false;
  if (!message.text.empty()) {
    try {
      TeamOf(control_, UnpackRanks(message.text), static_cast<uint32_t>(message.number));
    } catch (const Error& error) {
      // Where there is no room, the rank finds that there is none when it has all that there is.
      if (error.kind() != std::string(kind::kRuntime)) return false;
    }
  }
  TellTeams(other);
  other.link.Send({About::kTeamsSaid, message.rank, 0, ""});
  return true;
}

void Nodes::TellTeams(Other& other) {
  const uint32_t count = control_.num_teams.load(std::memory_order_acquire);
  for (; other.teams < count; ++other.teams) {
    const TeamRecord& record = control_.teams[other.teams];
    const uint64_t id = kFirstTeam + other.teams;
    other.link.Send({About::kTeam, -1, id << 32 | record.copy,
                     std::string(record.ranks, record.ranks + record.size)});
  }
}

bool Nodes::HandleRecover(const NodeMessage& message) {
  const uint32_t now = control_.generation.load(std::memory_order_acquire);
  if (beginning_ != 0) return false;
  if (message.number == now) {  // asked again, since another node could not
    up_->link.Send({About::kRecovered, -1, now, ""});
    return true;
  }
  if (message.number != uint64_t{now} + 1) return false;
  beginning_ = now + 1;
  since_ = Clock::now();
  return true;
}

void Nodes::Tidy() {
  TakeNew();
  TellAborts();
  if (here_ < 0) {
    for (const auto& other : others_) TellTeams(*other);
    AskToRecover();
  } else {
    AnswerRecovery();
  }
  patience_ = static_cast<int>(times_.beat.count());
  for (const auto& other : others_) patience_ = std::min(patience_, other->link.Tick());
  if (beginning_ != 0) patience_ = 1;
  for (auto it = others_.begin(); it != others_.end();) {
    Other& other = **it;
    if (other.link.broken().empty()) {
      ++it;
      continue;
    }
    const std::string why = other.link.broken();
    if (up_ == &other) up_ = nullptr;
    const int node = other.node;
    it = others_.erase(it);
    patience_ = 0;  // others are to hear of it
    if (here_ < 0) {
      monitor_.LoseNode(node, why);
    } else {
      monitor_.LoseController(why);
    }
  }
}

void Nodes::TellAborts() {
  const Monitor::Ended ended = monitor_.WhatEnded();
  if (ended.word == 0) return;
  NodeMessage message{About::kAbort, ended.pid, uint64_t{ended.generation} << 32 | ended.word, ""};
  for (const auto& other : others_) {
    if (other->told && other->told_generation >= ended.generation) continue;
    other->told = true;
    other->told_generation = ended.generation;
    other->link.SendFirst(message);
  }
}

void Nodes::AskToRecover() {
  uint64_t request;
  const uint32_t wanted = monitor_.wanted_generation(&request);
  if (wanted == 0) return;
  for (const auto& other : others_) {
    if (other->asked == request) continue;
    other->asked = request;
    other->link.Send({About::kRecover, -1, wanted, ""});
  }
}

void Nodes::AnswerRecovery() {
  if (beginning_ == 0) return;
  const bool late = Clock::now() - since_ > kIdleTime;
  const bool done = monitor_.BeginIfIdle();
  if (!done && !late) return;
  NodeMessage answer{About::kRecovered, -1, beginning_, ""};
  if (!done) answer.text = kNotIdle;
  if (up_ != nullptr) up_->link.Send(answer);
  beginning_ = 0;
}

}  // namespace tvm_ipc
