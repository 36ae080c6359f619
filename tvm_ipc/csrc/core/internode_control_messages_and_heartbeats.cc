/* SPDX-License-Identifier: Apache-2.0 */
/*! \file internode_control_messages_and_heartbeats.cc */
#include "core/internode_control_messages_and_heartbeats.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/atfork_descriptors.h"
#include "core/error.h"

namespace tvm_ipc {

namespace {

/*! \brief The header of a packed message; its text follows. */
struct NodeMessageHeader {
  NodeMessage::Type type;
  int32_t rank;
  uint64_t number;
};

constexpr const char* kInvalid = "its connection carried bytes that are no message of this library";

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
  return AsBytes(NodeMessageHeader{type, rank, number}) + text;
}

bool NodeMessage::Unpack(const std::string& bytes, NodeMessage* message) {
  NodeMessageHeader header;
  if (bytes.size() < sizeof(header)) return false;
  memcpy(&header, bytes.data(), sizeof(header));
  if (header.type < Type::kGreeted || header.type > Type::kBeat) return false;
  *message = {header.type, header.rank, header.number, bytes.substr(sizeof(header))};
  return true;
}

NodeLink::NodeLink(File socket, const LinkTimes& times, bool late)
    : socket_(socket.Give()), times_(times), reader_(LinkLimits()), silence_counts_(!late) {
  KeepFromChildren(socket_);
  // On other sockets than TCP these have no effect.
  const int on = 1;
  const int silence = static_cast<int>(times.silence.count());
  setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  const int tcp = setsockopt(socket_, IPPROTO_TCP, TCP_USER_TIMEOUT, &silence, sizeof(silence));
  watched_by_kernel_ = late && tcp == 0;
  received_at_ = sent_at_ = progress_at_ = due_ = Clock::now();
}

NodeLink::~NodeLink() { CloseKept(socket_); }

void NodeLink::Break(const std::string& why) {
  if (broken_.empty()) broken_ = why;
}

void NodeLink::Queue(std::deque<std::string>* queue, FrameType type, const char* bytes,
                     size_t count) {
  if (queued_ == 0) progress_at_ = Clock::now();
  queue->push_back(AsBytes(FrameHeader{type, 0, count}) + std::string(bytes, count));
  queued_ += queue->back().size();
}

void NodeLink::Send(const NodeMessage& message) {
  if (!broken_.empty()) return;
  const std::string bytes = message.Pack();
  if (bytes.size() > kLargestMessage) {
    return Break(Text("a message of ", bytes.size(), " bytes exceeds the limit of ",
                      kLargestMessage, " bytes"));
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

void NodeLink::Receive() {
  if (!broken_.empty()) return;
  const bool more = reader_.Read(socket_);
  const int error = errno;
  received_at_ = Clock::now();
  silence_counts_ = !watched_by_kernel_;
  if (more) return;
  Break(error == EPROTO ? kInvalid
        : error == 0    ? "its connection was closed"
                        : Text("its connection ended: ", strerror(error)));
}

bool NodeLink::Next(NodeMessage* message) {
  Frame frame;
  while (reader_.Next(&frame)) {
    const bool urgent = frame.type == FrameType::kUrgent;
    if (!urgent) {
      if (partial_.size() + frame.payload.size() > kLargestMessage) {
        return GiveUp("it sent a message that exceeds the size limit");
      }
      partial_ += frame.payload;
      if (frame.type == FrameType::kPiece) continue;
    }
    const std::string whole = urgent ? frame.payload : std::exchange(partial_, std::string());
    if (!NodeMessage::Unpack(whole, message)) return GiveUp(kInvalid);
    if (message->type != NodeMessage::Type::kBeat) return true;
  }
  return false;
}

bool NodeLink::GiveUp(const std::string& why) {
  broken_ = why;
  reader_ = FrameReader(LinkLimits());
  partial_ = std::string();
  return false;
}

void NodeLink::Flush() {
  while (queued_ > 0) {
    if (current_.empty()) {
      std::deque<std::string>& queue = urgent_.empty() ? ordered_ : urgent_;
      current_ = std::move(queue.front());
      queue.pop_front();
      current_sent_ = 0;
    }
    const int64_t sent = SendSome(socket_, current_.data() + current_sent_,
                                  current_.size() - current_sent_, {}, MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      return Break(Text("its connection ended: ", strerror(errno)));
    }
    sent_at_ = progress_at_ = Clock::now();
    current_sent_ += static_cast<size_t>(sent);
    queued_ -= static_cast<size_t>(sent);
    if (current_sent_ == current_.size()) current_.clear();
  }
}

void NodeLink::ExcludeStandstill() {
  const auto now = Clock::now();
  const auto late = now - due_;
  if (late <= times_.beat) return;
  received_at_ = std::min(now, received_at_ + late);
  progress_at_ = std::min(now, progress_at_ + late);
}

int NodeLink::Tick() {
  if (!broken_.empty()) return 0;
  ExcludeStandstill();
  if (queued_ == 0 && Clock::now() - sent_at_ >= times_.beat) SendFirst(NodeMessage{});
  Flush();
  const auto now = Clock::now();
  if (silence_counts_ && now - received_at_ > times_.silence) {
    Break(Text("it sent nothing for ", InSeconds(times_.silence), " s"));
  }
  if (queued_ > 0 && now - progress_at_ > times_.silence) {
    Break(Text("it accepted no data for ", InSeconds(times_.silence), " s"));
  }
  auto next = queued_ > 0 ? progress_at_ + times_.silence : sent_at_ + times_.beat;
  if (silence_counts_) next = std::min(next, received_at_ + times_.silence);
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - now).count();
  const auto patience = std::chrono::milliseconds(std::max<int64_t>(0, left) + 1);
  due_ = now + patience;
  return static_cast<int>(patience.count());
}

}  // namespace tvm_ipc
