/* SPDX-License-Identifier: Apache-2.0 */
/*! \file node_link.cc */
#include "core/node_link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/forked.h"

namespace tvm_ipc {

namespace {

/*! \brief What a packed message begins with; its text follows. */
struct NodeMessageHeader {
  NodeMessage::About about;
  int32_t rank;
  uint64_t number;
};

constexpr const char* kNonsense = "what came over its connection is no message of this library";

FrameLimits LinkLimits() {
  FrameLimits limits;
  limits.bytes = kPieceBytes;
  limits.first = FrameType::kPiece;
  limits.last = FrameType::kUrgent;
  limits.files = 0;
  return limits;
}

double InSeconds(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

std::string NodeMessage::Pack() const {
  return AsBytes(NodeMessageHeader{about, rank, number}) + text;
}

bool NodeMessage::Unpack(const std::string& bytes, NodeMessage* message) {
  NodeMessageHeader header;
  if (bytes.size() < sizeof(header)) return false;
  memcpy(&header, bytes.data(), sizeof(header));
  if (header.about < About::kGreeted || header.about > About::kBeat) return false;
  *message = {header.about, header.rank, header.number, bytes.substr(sizeof(header))};
  return true;
}

NodeLink::NodeLink(File socket, const LinkTimes& times, bool late)
    : socket_(socket.Give()), times_(times), reader_(LinkLimits()), begun_to_speak_(!late) {
  KeepFromChildren(socket_);
  // Of a socket that is none of TCP these do nothing.
  const int on = 1;
  const int silence = static_cast<int>(times.silence.count());
  setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(socket_, IPPROTO_TCP, TCP_USER_TIMEOUT, &silence, sizeof(silence));
  heard_ = said_ = moved_ = due_ = Clock::now();
}

NodeLink::~NodeLink() { CloseKept(socket_); }

void NodeLink::Break(const std::string& why) {
  if (broken_.empty()) broken_ = why;
}

void NodeLink::Queue(std::deque<std::string>* queue, FrameType type, const char* bytes,
                     size_t count) {
  if (queued_ == 0) moved_ = Clock::now();
  queue->push_back(AsBytes(FrameHeader{type, 0, count}) + std::string(bytes, count));
  queued_ += queue->back().size();
}

void NodeLink::Send(const NodeMessage& message) {
  if (!broken_.empty()) return;
  const std::string bytes = message.Pack();
  if (bytes.size() > kLargestMessage) {
    return Break(Text("a message of ", bytes.size(), " bytes is too large for it"));
  }
  for (size_t at = 0; at < bytes.size();) {
    const size_t count = std::min(kPieceBytes, bytes.size() - at);
    const bool last = at + count == bytes.size();
    Queue(&ordered_, last ? FrameType::kLast : FrameType::kPiece, bytes.data() + at, count);
    at += count;
  }
}

void NodeLink::SendFirst(const NodeMessage& message) {
  if (!broken_.empty()) return;
  const std::string bytes = message.Pack();
  Queue(&urgent_, FrameType::kUrgent, bytes.data(), bytes.size());
}

void NodeLink::Watch(std::vector<pollfd>* polled) const {
  const short events = queued_ == 0 ? POLLIN : POLLIN | POLLOUT;
  polled->push_back({socket_, events, 0});
}

void NodeLink::Hear() {
  if (!broken_.empty()) return;
  const bool more = reader_.Read(socket_);
  const int error = errno;
  heard_ = Clock::now();
  begun_to_speak_ = true;
  if (more) return;
  Break(error == EPROTO ? kNonsense
        : error == 0    ? "its connection was closed"
                        : Text("its connection ended: ", strerror(error)));
}

bool NodeLink::Next(NodeMessage* message) {
  Frame frame;
  while (reader_.Next(&frame)) {
    const bool urgent = frame.type == FrameType::kUrgent;
    if (!urgent) {
      if (begun_.size() + frame.payload.size() > kLargestMessage) {
        return GiveUp("a message over its connection is larger than one may be");
      }
      begun_ += frame.payload;
      if (frame.type == FrameType::kPiece) continue;
    }
    const std::string whole = urgent ? frame.payload : std::exchange(begun_, std::string());
    if (!NodeMessage::Unpack(whole, message)) return GiveUp(kNonsense);
    if (message->about != NodeMessage::About::kBeat) return true;
  }
  return false;
}

bool NodeLink::GiveUp(const std::string& why) {
  broken_ = why;
  reader_ = FrameReader(LinkLimits());
  begun_ = std::string();
  return false;
}

void NodeLink::Flush() {
  while (queued_ > 0) {
    if (current_.empty()) {
      std::deque<std::string>& queue = urgent_.empty() ? ordered_ : urgent_;
      current_ = std::move(queue.front());
      queue.pop_front();
      gone_ = 0;
    }
    const int64_t sent =
        SendSome(socket_, current_.data() + gone_, current_.size() - gone_, {}, MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      return Break(Text("its connection ended: ", strerror(errno)));
    }
    said_ = moved_ = Clock::now();
    gone_ += static_cast<size_t>(sent);
    queued_ -= static_cast<size_t>(sent);
    if (gone_ == current_.size()) current_.clear();
  }
}

void NodeLink::LeaveOutStandstill() {
  const auto now = Clock::now();
  const auto late = now - due_;
  if (late <= times_.beat) return;
  heard_ = std::min(now, heard_ + late);
  moved_ = std::min(now, moved_ + late);
}

int NodeLink::Tick() {
  if (!broken_.empty()) return 0;
  LeaveOutStandstill();
  if (queued_ == 0 && Clock::now() - said_ >= times_.beat) SendFirst(NodeMessage{});
  Flush();
  const auto now = Clock::now();
  if (begun_to_speak_ && now - heard_ > times_.silence) {
    Break(Text("nothing came from it for ", InSeconds(times_.silence), " s"));
  }
  if (queued_ > 0 && now - moved_ > times_.silence) {
    Break(Text("it took nothing for ", InSeconds(times_.silence), " s"));
  }
  auto next = queued_ > 0 ? moved_ + times_.silence : said_ + times_.beat;
  if (begun_to_speak_) next = std::min(next, heard_ + times_.silence);
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - now).count();
  const auto patience = std::chrono::milliseconds(std::max<int64_t>(0, left) + 1);
  due_ = now + patience;
  return static_cast<int>(patience.count());
}

}  // namespace tvm_ipc
