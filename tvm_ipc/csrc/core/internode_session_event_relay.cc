/* SPDX-License-Identifier: Apache-2.0 */
/*! \file internode_session_event_relay.cc */
#include "core/internode_session_event_relay.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/teams.h"
#include "core/wait.h"

namespace tvm_ipc {

namespace {

using Type = NodeMessage::Type;
using Clock = std::chrono::steady_clock;

}  // namespace

Nodes::Nodes(Control& control, WorkerTable& worker_table, int here, const LinkTimes& times)
    : control_(control), worker_table_(worker_table), here_(here), times_(times) {
  if (here_ < 0) return;
  worker_table_.ForwardTo([this](NodeMessage message) {
    if (controller_ != nullptr) {
      controller_->link.Send(message);
    } else if (!control_.abort.load()) {
      unsent_.push_back(std::move(message));
    }
  });
}

void Nodes::Attach(int node, File socket) {
  std::lock_guard<std::mutex> lock(mutex_);
  attached_.emplace_back(node, std::move(socket));
}

void Nodes::AdoptAttached() {
  std::vector<std::pair<int, File>> taken;
  if (std::lock_guard<std::mutex> lock(mutex_); true) taken.swap(attached_);
  for (auto& [node, socket] : taken) {
    // The controller sends its first message when all nodes are connected. Until then the node's
    // agent checks that it is alive.
    peers_.push_back(std::make_unique<Peer>(node, std::move(socket), times_, here_ >= 0));
    if (here_ < 0) continue;
    controller_ = peers_.back().get();
    for (const NodeMessage& message : unsent_) controller_->link.Send(message);
    unsent_.clear();
  }
}

int Nodes::Watch(std::vector<pollfd>* polled) {
  for (const auto& peer : peers_) peer->link.Watch(polled);
  return peers_.empty() ? -1 : patience_;
}

void Nodes::Serve(const pollfd& ready) {
  for (const auto& peer : peers_) {
    if (peer->link.socket() != ready.fd) continue;
    if (ready.revents & ~POLLOUT) peer->link.Receive();
    NodeMessage message;
    while (peer->link.Next(&message)) {
      if (Handle(*peer, std::move(message))) continue;
      peer->link.GiveUp("it sent a message that is not allowed, or not allowed now");
      break;
    }
  }
}

bool Nodes::Handle(Peer& peer, NodeMessage message) {
  if (message.type == Type::kAbort) {
    const auto generation = static_cast<uint32_t>(message.number >> 32);
    const auto word = static_cast<uint32_t>(message.number);
    if (!peer.knows_abort || peer.abort_generation < generation) {
      peer.knows_abort = true;
      peer.abort_generation = generation;
    }
    return worker_table_.HandleNodeAbort(peer.node, generation, word, message.rank);
  }
  if (message.type == Type::kTeam || message.type == Type::kTeamsSent) {
    return HandleTeam(peer, message);
  }
  if (here_ < 0) return worker_table_.HandleNodeMessage(peer.node, std::move(message));
  return message.type == Type::kRecover && HandleRecover(message);
}

bool Nodes::HandleTeam(Peer& peer, const NodeMessage& message) {
  if (here_ < 0) return message.type == Type::kTeam && HandleQuestion(peer, message);
  if (message.type == Type::kTeam) {
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

bool Nodes::HandleQuestion(Peer& peer, const NodeMessage& message) {
  if (control_.NodeOf(message.rank) != peer.node) return false;
  if (!message.text.empty()) {
    try {
      TeamOf(control_, UnpackRanks(message.text), static_cast<uint32_t>(message.number));
    } catch (const Error& error) {
      // Without room the rank reports the error itself, once it has all teams.
      if (error.kind() != std::string(kind::kRuntime)) return false;
    }
  }
  SendTeams(peer);
  peer.link.Send({Type::kTeamsSent, message.rank, 0, ""});
  return true;
}

void Nodes::SendTeams(Peer& peer) {
  const uint32_t count = control_.num_teams.load(std::memory_order_acquire);
  for (; peer.teams < count; ++peer.teams) {
    const TeamRecord& record = control_.teams[peer.teams];
    const uint64_t id = kFirstTeam + peer.teams;
    peer.link.Send({Type::kTeam, -1, id << 32 | record.copy,
                    std::string(record.ranks, record.ranks + record.size)});
  }
}

bool Nodes::HandleRecover(const NodeMessage& message) {
  const uint32_t now = control_.generation.load(std::memory_order_acquire);
  if (next_generation_ != 0) return false;
  if (message.number == now) {  // requested again, because another node could not recover
    controller_->link.Send({Type::kRecovered, -1, now, ""});
    return true;
  }
  if (message.number != uint64_t{now} + 1) return false;
  next_generation_ = now + 1;
  since_ = Clock::now();
  return true;
}

void Nodes::Tidy() {
  AdoptAttached();
  SendAborts();
  if (here_ < 0) {
    for (const auto& peer : peers_) SendTeams(*peer);
    RequestRecovery();
  } else {
    AnswerRecovery();
  }
  patience_ = static_cast<int>(times_.beat.count());
  for (const auto& peer : peers_) patience_ = std::min(patience_, peer->link.Tick());
  if (next_generation_ != 0) patience_ = 1;
  for (auto it = peers_.begin(); it != peers_.end();) {
    Peer& peer = **it;
    if (peer.link.broken().empty()) {
      ++it;
      continue;
    }
    const std::string why = peer.link.broken();
    if (controller_ == &peer) controller_ = nullptr;
    const int node = peer.node;
    it = peers_.erase(it);
    patience_ = 0;  // the other nodes must learn of it
    if (here_ < 0) {
      worker_table_.LoseNode(node, why);
    } else {
      worker_table_.LoseController(why);
    }
  }
}

void Nodes::SendAborts() {
  const WorkerTable::AbortRecord record = worker_table_.CurrentAbort();
  if (record.word == 0) return;
  NodeMessage message{Type::kAbort, record.pid, uint64_t{record.generation} << 32 | record.word,
                      ""};
  for (const auto& peer : peers_) {
    if (peer->knows_abort && peer->abort_generation >= record.generation) continue;
    peer->knows_abort = true;
    peer->abort_generation = record.generation;
    peer->link.SendFirst(message);
  }
}

void Nodes::RequestRecovery() {
  uint64_t request;
  const uint32_t wanted = worker_table_.wanted_generation(&request);
  if (wanted == 0) return;
  for (const auto& peer : peers_) {
    if (peer->recovery_request == request) continue;
    peer->recovery_request = request;
    peer->link.Send({Type::kRecover, -1, wanted, ""});
  }
}

void Nodes::AnswerRecovery() {
  if (next_generation_ == 0) return;
  const bool late = Clock::now() - since_ > kIdleTime;
  const bool done = worker_table_.BeginIfIdle();
  if (!done && !late) return;
  NodeMessage answer{Type::kRecovered, -1, next_generation_, ""};
  if (!done) answer.text = kNotIdle;
  if (controller_ != nullptr) controller_->link.Send(answer);
  next_generation_ = 0;
}

}  // namespace tvm_ipc
