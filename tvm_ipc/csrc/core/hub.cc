/* SPDX-License-Identifier: Apache-2.0 */
/*! \file hub.cc */
#include "core/hub.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <utility>

#include "core/error.h"
#include "core/forked.h"
#include "core/group.h"

namespace tvm_ipc {

namespace {

/*! \brief 31 years. */
constexpr double kLongestSeconds = 1e9;
using Clock = std::chrono::steady_clock;

/*! \brief Strangers at a time: all workers of a session at once, and as many others. */
constexpr size_t kMaxStrangers = 2 * kMaxRanks;
/*! \brief How long a stranger may take to say who it is. */
constexpr std::chrono::seconds kStrangerTime{10};
/*! \brief How long to leave connections waiting when there is no descriptor, and how often. */
constexpr int kNoDescriptorMs = 50;
constexpr int kMaxNoDescriptor = 20;

int MakeFile(const char* name, size_t bytes) {
  const int file = memfd_create(name, MFD_CLOEXEC);
  if (file < 0) {
    const char* hint = errno == EMFILE || errno == ENFILE ? kMoreFiles : "";
    Fail(kind::kRuntime, "cannot make shared memory (memfd_create): ", strerror(errno), hint);
  }
  if (ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(file);
    Fail(kind::kMemory, "cannot reserve ", bytes, " bytes of shared memory: ", strerror(error));
  }
  return file;
}

std::chrono::duration<double> Seconds(double seconds) {
  return std::chrono::duration<double>(seconds);
}

std::string Hex(const std::string& bytes) {
  static const char* digits = "0123456789abcdef";
  std::string result;
  for (unsigned char byte : bytes) {
    result += digits[byte >> 4];
    result += digits[byte & 15];
  }
  return result;
}

void SendRefusal(int socket, const std::string& reason) {
  Welcome welcome{};
  reason.copy(welcome.reason, sizeof(welcome.reason) - 1);
  SendWelcome(socket, welcome, {});
}

std::string TakeField(const std::string& payload, size_t* position) {
  uint64_t bytes = 0;
  memcpy(&bytes, payload.data() + *position, sizeof(bytes));
  std::string field = payload.substr(*position + sizeof(bytes), bytes);
  *position += sizeof(bytes) + bytes;
  return field;
}

}  // namespace

size_t PhysicalMemory() {
  size_t bytes =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t limit = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit && limit < bytes) bytes = limit;
  return bytes;
}

size_t DefaultArenaBytes(int num_ranks) {
  return std::max<size_t>(PhysicalMemory() / 2 / num_ranks, size_t{64} << 20);
}

Hub::Hub(const HubOptions& options) : options_(options) {
  const int n = options_.num_ranks;
  if (n < 1 || n > kMaxRanks) {
    Fail(kind::kValue, "a session has 1 to ", kMaxRanks, " workers, not ", n);
  }
  // What is no deadline in practice must not become one in the past when it is counted in ns.
  options_.timeout_seconds = std::min(options_.timeout_seconds, kLongestSeconds);
  if (options_.arena_bytes == 0) options_.arena_bytes = DefaultArenaBytes(n);
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  options_.arena_bytes = (options_.arena_bytes + page - 1) / page * page;
  members_.resize(n);
  try {
    control_bytes_ = Control::Bytes(n);
    control_file_ = MakeFile("tvm_ipc control", control_bytes_);
    void* address =
        mmap(nullptr, control_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, control_file_, 0);
    if (address == MAP_FAILED) Fail(kind::kMemory, "cannot map memory: ", strerror(errno));
    control_ = static_cast<Control*>(address);
    control_->num_ranks = n;
    control_->controller_pid = getpid();
    control_->arena_bytes = options_.arena_bytes;
    for (int i = 0; i < n; ++i) {
      segment_files_.push_back(MakeFile("tvm_ipc segment", ArenaStart(n) + options_.arena_bytes));
    }
    Listen();
    KeepFromChildren(listener_);
    thread_ = StartThread("the session's hub", [this] { Run(); });
  } catch (...) {
    for (int file : segment_files_) close(file);
    if (control_file_ >= 0) close(control_file_);
    if (control_ != nullptr) munmap(control_, control_bytes_);
    CloseKept(listener_);
    if (wake_ >= 0) close(wake_);
    throw;
  }
}

Hub::~Hub() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) < 0) {
  }
  thread_.join();
  for (Member& member : members_) {
    CloseKept(member.socket);
    if (member.process >= 0) close(member.process);
  }
  CloseDoor();
  close(wake_);
  munmap(control_, control_bytes_);
}

void Hub::Listen() {
  invitation_ = Invitation{"tvm_ipc." + Hex(RandomToken()), RandomToken(), ThisMachine()};
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path + 1, invitation_.socket_name.data(), invitation_.socket_name.size());
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + invitation_.socket_name.size());
  if (wake_ < 0 || listener_ < 0 ||
      bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener_, kMaxRanks) != 0) {
    const char* hint = errno == EMFILE || errno == ENFILE ? kMoreFiles : "";
    Fail(kind::kRuntime, "cannot listen for workers: ", strerror(errno), hint);
  }
}

void Hub::Run() {
  std::vector<pollfd> polled;
  std::vector<int> owners;  // the rank a polled file belongs to, -1 for strangers
  bool descriptors = true;  // for one more connection
  int without = 0;          // how often in a row there were none
  while (true) {
    polled.clear();
    owners.clear();
    int patience;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stop_) return;
      polled.push_back({wake_, POLLIN, 0});
      polled.push_back({descriptors ? listener_ : -1, POLLIN, 0});
      owners = {-1, -1};
      for (const Stranger& stranger : strangers_) {
        polled.push_back({stranger.socket, POLLIN, 0});
        owners.push_back(-1);
      }
      for (size_t rank = 0; rank < members_.size(); ++rank) {
        for (int file : {members_[rank].socket, members_[rank].process}) {
          if (file < 0) continue;
          polled.push_back({file, POLLIN, 0});
          owners.push_back(static_cast<int>(rank));
        }
      }
      patience = Patience();
    }
    if (!descriptors) patience = kNoDescriptorMs;
    descriptors = true;
    if (poll(polled.data(), polled.size(), patience) < 0) continue;
    for (size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      const int file = polled[i].fd;
      if (file == wake_) {
        uint64_t count;
        if (read(wake_, &count, sizeof(count)) < 0) continue;
      } else if (i == 1) {
        descriptors = Accept();
        without = descriptors ? 0 : without + 1;
        if (without == kMaxNoDescriptor) {
          std::lock_guard<std::mutex> lock(mutex_);
          refusals_.push_back(
              Text("the controller has no descriptor for a connection", kMoreFiles));
          changed_.notify_all();
        }
      } else if (owners[i] < 0) {
        HearStranger(file);
      } else if (file == members_[owners[i]].process) {
        // What the process sent before it ended is still to be read from its socket.
        Hear(owners[i]);
        Leave(owners[i], true);
      } else if (file == members_[owners[i]].socket) {
        Hear(owners[i]);
      }
    }
    std::lock_guard<std::mutex> lock(mutex_);
    bool crowded = !descriptors;
    while (!strangers_.empty() &&
           (std::exchange(crowded, false) || strangers_.size() > kMaxStrangers ||
            Clock::now() - strangers_.front().came > kStrangerTime)) {
      CloseKept(strangers_.front().socket);
      strangers_.erase(strangers_.begin());
    }
  }
}

int Hub::Patience() const {
  if (strangers_.empty()) return -1;
  const auto left = strangers_.front().came + kStrangerTime - Clock::now();
  return std::max<int>(0, std::chrono::ceil<std::chrono::milliseconds>(left).count()) + 1;
}

/*! \brief Let somebody in; false when there is no descriptor left for anybody. */
bool Hub::Accept() {
  const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (socket < 0) return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
  ucred peer{};
  socklen_t size = sizeof(peer);
  getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size);
  if (peer.uid != geteuid()) {  // anybody may connect to an abstract socket
    close(socket);
    return true;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  KeepFromChildren(socket);
  strangers_.push_back({socket, Clock::now(), ""});
  return true;
}

bool Hub::KnowsToken(const Hello& hello) const {
  return memcmp(hello.token, invitation_.token.data(), sizeof(hello.token)) == 0;
}

std::string Hub::CheckHello(const Hello& hello) const {
  const int n = options_.num_ranks;
  const int groups = control_->num_groups;  // 0 until the first worker says it
  if (hello.num_ranks != n || (groups != 0 && hello.num_groups != groups)) {
    return Text("rank ", hello.rank, " was started for ", hello.num_ranks, " workers in ",
                hello.num_groups, " groups, the session has ", n, " in ", groups);
  }
  if (hello.num_groups < 1 || n % hello.num_groups != 0) {
    return Text(n, " workers cannot be divided into ", hello.num_groups, " groups");
  }
  if (hello.rank < 0 || hello.rank >= n) return Text("there is no rank ", hello.rank);
  if (members_[hello.rank].greeted) return Text("rank ", hello.rank, " has joined already");
  return "";
}

void Hub::HearStranger(int socket) {
  struct {
    frame::Header header;
    Hello hello;
  } request;
  std::lock_guard<std::mutex> lock(mutex_);
  auto stranger = std::find_if(strangers_.begin(), strangers_.end(),
                               [&](const Stranger& one) { return one.socket == socket; });
  if (stranger == strangers_.end()) return;  // the door was closed meanwhile
  char bytes[sizeof(request)];
  const ssize_t got = recv(socket, bytes, sizeof(request) - stranger->said.size(), 0);
  if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return;
  if (got > 0) stranger->said.append(bytes, static_cast<size_t>(got));
  const bool whole = stranger->said.size() == sizeof(request);
  if (got > 0 && !whole) return;
  if (whole) memcpy(&request, stranger->said.data(), sizeof(request));
  strangers_.erase(stranger);
  if (whole && request.header.type == frame::kHello) {
    if (KnowsToken(request.hello)) return Admit(socket, request.hello);
    SendRefusal(socket, "the token is not this session's");
  }
  CloseKept(socket);  // none of ours, and nothing to this session
}

/*! \brief Give a worker the files, or the reason why not. */
void Hub::Admit(int socket, const Hello& hello) {
  // What it reads and writes from here on may wait; `Hear` says where it must not.
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) & ~O_NONBLOCK);
  Welcome welcome{};
  std::string refusal = CheckHello(hello);
  if (refusal.empty()) {
    if (control_->num_groups == 0) control_->num_groups = hello.num_groups;
    // Known before the rank itself can say it: it may die at once.
    control_->ranks[hello.rank].pid.store(hello.pid, std::memory_order_relaxed);
    const WaitPolicy policy = ChooseWaitPolicy(options_.num_ranks, AvailableCores());
    welcome.accepted = 1;
    welcome.deadline_ns = static_cast<int64_t>(options_.timeout_seconds * 1e9);
    welcome.spins = policy.spins;
    welcome.yields = policy.yields;
    options_.instruction_set.copy(welcome.instruction_set, sizeof(welcome.instruction_set) - 1);
    std::vector<int> files{control_file_};
    files.insert(files.end(), segment_files_.begin(), segment_files_.end());
    welcome.num_files = static_cast<int32_t>(files.size());
    errno = 0;
    if (!SendWelcome(socket, welcome, files)) {
      refusal = Text("the files of the shared memory could not be sent: ", strerror(errno),
                     errno == ETOOMANYREFS ? kMoreFiles : "");
    }
  }
  changed_.notify_all();
  if (!refusal.empty()) {
    SendRefusal(socket, refusal);
    CloseKept(socket);
    refusals_.push_back(refusal);
    return;
  }
  Member& member = members_[hello.rank];
  member.socket = socket;
  member.greeted = true;
  member.pid = hello.pid;
  if (member.pid != getpid()) member.process = OpenProcess(member.pid);
  // Nobody else comes: what is mapped stays, the files need no names here.
  if (std::all_of(members_.begin(), members_.end(), [](const Member& m) { return m.greeted; })) {
    CloseDoor();
  }
}

void Hub::CloseDoor() {
  for (const Stranger& stranger : strangers_) CloseKept(stranger.socket);
  strangers_.clear();
  for (int file : segment_files_) close(file);
  segment_files_.clear();
  if (control_file_ >= 0) close(control_file_);
  CloseKept(listener_);
  control_file_ = listener_ = -1;
}

void Hub::Hear(int rank) {
  Member& member = members_[rank];
  if (member.socket < 0) return;
  char chunk[64 << 10];
  bool ended = false;
  while (!ended) {
    const ssize_t got = recv(member.socket, chunk, sizeof(chunk), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (got > 0) member.received.append(chunk, static_cast<size_t>(got));
    ended = got <= 0;
  }
  size_t position = 0;
  frame::Header header;
  while (member.received.size() - position >= sizeof(header)) {
    memcpy(&header, member.received.data() + position, sizeof(header));
    if (member.received.size() - position - sizeof(header) < header.bytes) break;
    position += sizeof(header);
    HandleFrame(rank, header.type, member.received.substr(position, header.bytes));
    position += header.bytes;
    if (member.socket < 0) return;
  }
  member.received.erase(0, position);
  if (ended) Leave(rank, true);  // without a goodbye among its last frames
}

void Hub::HandleFrame(int rank, uint32_t type, std::string payload) {
  if (type == frame::kBye) {
    Leave(rank, false);
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t ticket = 0;
  if (payload.size() >= sizeof(ticket)) memcpy(&ticket, payload.data(), sizeof(ticket));
  switch (type) {
    case frame::kJoined:
      members_[rank].joined = true;
      break;
    case frame::kDone:
      members_[rank].done = std::max(members_[rank].done, ticket);
      break;
    case frame::kValue:
      if (auto value = values_.find(ticket); value != values_.end()) {
        value->second = payload.substr(sizeof(ticket));
      }
      break;
    case frame::kError: {
      size_t position = 0;
      RankReport report{rank, "", "", ""};
      report.kind = TakeField(payload, &position);
      report.message = TakeField(payload, &position);
      report.traceback = TakeField(payload, &position);
      errors_.push_back(std::move(report));
      break;
    }
    default:
      break;
  }
  changed_.notify_all();
}

void Hub::Leave(int rank, bool dead) {
  std::lock_guard<std::mutex> lock(mutex_);
  Member& member = members_[rank];
  if (member.left) return;
  member.left = true;
  member.dead = dead;
  CloseKept(member.socket);
  if (member.process >= 0) close(member.process);
  member.socket = member.process = -1;
  if (dead) Abort(*control_, AbortReason::kDied, rank);
  changed_.notify_all();
}

bool Hub::WaitJoined(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto all_joined = [this] {
    return std::all_of(members_.begin(), members_.end(), [](const Member& m) { return m.joined; });
  };
  auto over = [&] {
    return all_joined() || !refusals_.empty() || !errors_.empty() ||
           std::any_of(members_.begin(), members_.end(), [](const Member& m) { return m.dead; });
  };
  changed_.wait_for(lock, Seconds(seconds), over);
  return all_joined();
}

void Hub::ReportError(RankReport error) {
  std::lock_guard<std::mutex> lock(mutex_);
  errors_.push_back(std::move(error));
  changed_.notify_all();
}

Hub::Progress Hub::WaitDone(uint64_t ticket, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto done = [&] {
    return std::all_of(members_.begin(), members_.end(),
                       [&](const Member& m) { return m.done >= ticket; });
  };
  auto lost = [&] {
    return std::any_of(members_.begin(), members_.end(), [](const Member& m) { return m.left; });
  };
  changed_.wait_for(lock, Seconds(seconds), [&] { return done() || lost(); });
  if (lost()) return Progress::kAttention;
  if (!done()) return Progress::kPending;  // an error is told when every rank has come to rest
  return errors_.empty() ? Progress::kDone : Progress::kAttention;
}

bool Hub::WaitLeft(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, Seconds(seconds), [this] {
    return std::all_of(members_.begin(), members_.end(),
                       [](const Member& m) { return m.left || !m.greeted; });
  });
}

HubReport Hub::Report() {
  std::lock_guard<std::mutex> lock(mutex_);
  HubReport report;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    const Member& member = members_[rank];
    if (member.joined) report.joined.push_back(static_cast<int>(rank));
    if (member.dead) report.dead.push_back(static_cast<int>(rank));
    if (member.left && !member.dead) report.left.push_back(static_cast<int>(rank));
    report.pids.push_back(member.pid);
    report.done.push_back(member.done);
  }
  report.errors = errors_;
  report.refusals = refusals_;
  return report;
}

void Hub::WantValue(uint64_t key) {
  std::lock_guard<std::mutex> lock(mutex_);
  values_[key];
}

std::string Hub::TakeValue(uint64_t key) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = values_.find(key);
  if (it == values_.end()) return "";
  std::string value = std::move(it->second);
  values_.erase(it);
  return value;
}

void Hub::Recover() {
  std::lock_guard<std::mutex> lock(mutex_);
  errors_.clear();
  Control& control = *control_;
  auto clear = [](Slot(&slots)[2]) {
    for (Slot& slot : slots) slot.seq.store(0, std::memory_order_relaxed);
  };
  for (auto& row : control.seats) {
    for (int r = 0; r < control.num_ranks; ++r) clear(row[r].slot);
  }
  for (int i = 0; i < control.num_ranks * control.num_ranks; ++i) {
    clear(control.channels()[i].slot);
    control.channels()[i].taken.store(0, std::memory_order_relaxed);
  }
  for (int r = 0; r < control.num_ranks; ++r) control.ranks[r].failed.store(0);
  control.generation.fetch_add(1, std::memory_order_release);
  control.abort.store(0, std::memory_order_release);
}

void Hub::AbortClosed() { Abort(*control_, AbortReason::kClosed, 0); }

bool Hub::finished() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(members_.begin(), members_.end(), [](const Member& m) { return m.left; });
}

}  // namespace tvm_ipc
