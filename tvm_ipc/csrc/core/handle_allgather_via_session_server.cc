/* SPDX-License-Identifier: Apache-2.0 */
/*! \file handle_allgather_via_session_server.cc */
#include "core/handle_allgather_via_session_server.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "core/rank_runtime_state.h"

namespace tvm_ipc {

namespace {

using Clock = std::chrono::steady_clock;

/*! \brief The interval at which a waiting rank checks for an abort. */
constexpr std::chrono::milliseconds kLook{10};

/*! \brief The minimum deadline of an exchange while the backends start. */
constexpr std::chrono::nanoseconds kStartTime = std::chrono::seconds{60};

/*! \brief Read the header of an exchange's frame; return false if the payload is too short. */
bool TakeHeader(const std::string& payload, HandleAllGatherHeader* header) {
  if (payload.size() < sizeof(*header)) return false;
  memcpy(header, payload.data(), sizeof(*header));
  return true;
}

[[noreturn]] void FailDeadline(const Rank& rank, const std::string& what, uint32_t count,
                               std::chrono::nanoseconds patience) {
  std::ostringstream missing;
  const char* separator = "";
  for (int i = 0; i < rank.num_ranks(); ++i) {
    const RankState& state = rank.control().ranks[i];
    if (state.handle_all_gathers.load() >= count) continue;
    missing << separator << "rank " << i << " (pid " << state.pid.load() << ")";
    separator = ", ";
  }
  Fail(kind::kDeadline, "the exchange of ", what, " waited ",
       std::chrono::duration<double>(patience).count(), " s for ",
       *separator ? missing.str() : "the controller",
       "; every rank must take part, or raise the timeout (TVM_IPC_TIMEOUT)");
}

[[noreturn]] void FailMismatch(const std::vector<std::string>& names) {
  std::ostringstream os;
  for (size_t i = 0; i < names.size(); ++i) {
    os << (i == 0 ? ": " : "; ") << "rank " << i << " exchanges " << names[i];
  }
  Fail(kind::kMismatch, "the ranks disagree", os.str());
}

}  // namespace

bool Outgoing::Send(int socket) {
  while (!messages_.empty()) {
    const Message& first = *messages_.front();
    const std::vector<int> files = sent_ == 0 ? Descriptors(first.files) : std::vector<int>();
    const int64_t sent = SendSome(socket, first.bytes.data() + sent_, first.bytes.size() - sent_,
                                  files, MSG_DONTWAIT);
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    sent_ += static_cast<size_t>(sent);
    if (sent_ < first.bytes.size()) continue;
    messages_.pop_front();
    sent_ = 0;
  }
  return true;
}

void Outgoing::Clear() { messages_.resize(sent_ > 0 ? 1 : 0); }

std::vector<std::shared_ptr<const Message>> HandleAllGather::Add(int rank, Frame frame) {
  std::vector<std::shared_ptr<const Message>> complete;
  HandleAllGatherHeader header;
  if (!TakeHeader(frame.payload, &header)) return complete;
  header.rank = rank;
  const FrameHeader outer{FrameType::kShared, static_cast<uint32_t>(frame.files.size()),
                          frame.payload.size()};
  auto& exposed = exposed_[header.number];
  exposed[rank] = std::make_shared<Message>(
      Message{AsBytes(outer) + AsBytes(header) + frame.payload.substr(sizeof(header)),
              std::move(frame.files)});
  if (exposed.size() < static_cast<size_t>(num_ranks_)) return complete;
  for (auto& [from, message] : exposed) complete.push_back(std::move(message));
  exposed_.erase(header.number);
  return complete;
}

std::vector<Exported> AllGatherHandles(Rank& rank, const std::string& what, Exported mine) {
  rank.CheckSession();
  if (rank.control().ranks_here < rank.num_ranks()) {
    Fail(kind::kRuntime, "the exchange of ", what,
         ": the ranks are on several nodes, and memory is"
         " shown inside of one");
  }
  if (mine.files.size() > kMaxFrameFiles) {
    Fail(kind::kValue, "the exchange of ", what, ": a rank can show ", kMaxFrameFiles,
         " files at once, not ", mine.files.size());
  }
  Control& control = rank.control();
  std::lock_guard<std::mutex> lock(rank.connection().receive_mutex());
  const uint32_t count = control.ranks[rank.id()].handle_all_gathers.fetch_add(1) + 1;
  const uint64_t number = uint64_t{control.generation.load()} << 32 | count;
  std::string payload = AsBytes(HandleAllGatherHeader{number, rank.id(), 0});
  payload += PackField(what) + mine.bytes;
  // Devices may take longer to start than a session's deadline for operations.
  const auto patience =
      rank.started() ? rank.options().deadline : std::max(rank.options().deadline, kStartTime);
  const auto end = Clock::now() + patience;
  if (!rank.connection().Send(FrameType::kShared, payload, Descriptors(mine.files))) {
    Fail(kind::kRuntime, "the exchange of ", what, ": what rank ", rank.id(),
         " shows could not be sent: ", strerror(errno), errno == ETOOMANYREFS ? kMoreFiles : "");
  }
  mine.files.clear();
  std::vector<Exported> all(rank.num_ranks());
  std::vector<std::string> names(rank.num_ranks());
  bool agree = true;
  for (int missing = rank.num_ranks(); missing > 0;) {
    Frame frame;
    if (!rank.connection().Receive(&frame, std::min(end, Clock::now() + kLook))) {
      if (control.abort.load(std::memory_order_acquire) != 0) {
        Fail(kind::kPeer, "the exchange of ", what, " was stopped: ", DescribeAbort(control));
      }
      if (rank.connection().ended()) {
        Fail(kind::kRuntime, "the exchange of ", what, " was stopped: the controller is gone");
      }
      if (Clock::now() >= end) FailDeadline(rank, what, count, patience);
      continue;
    }
    HandleAllGatherHeader header;
    if (frame.type != FrameType::kShared || !TakeHeader(frame.payload, &header)) continue;
    if (header.number != number) continue;  // from an abandoned exchange
    if (header.rank < 0 || header.rank >= rank.num_ranks()) continue;
    if (frame.lost_files) {
      Fail(kind::kRuntime, "the exchange of ", what, ": rank ", rank.id(),
           " has no descriptors for the files of rank ", header.rank, kMoreFiles);
    }
    size_t position = sizeof(header);
    if (!TakeField(frame.payload, &position, &names[header.rank])) {
      Fail(kind::kRuntime, "the exchange of ", what, ": what rank ", header.rank,
           " sent has no name");
    }
    agree = agree && names[header.rank] == what;
    all[header.rank] = Exported{frame.payload.substr(position), std::move(frame.files)};
    --missing;
  }
  if (!agree) FailMismatch(names);
  return all;
}

}  // namespace tvm_ipc
