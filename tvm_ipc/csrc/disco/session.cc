/* SPDX-License-Identifier: Apache-2.0 */
/*! \file session.cc */
#include "disco/session.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/json.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/forked.h"
#include "core/join.h"
#include "disco/mailbox.h"
#include "disco/outbox.h"
#include "disco/value.h"
#include "disco/worker.h"

namespace tvm_ipc {

namespace ffi = tvm::ffi;
using tvm::runtime::DRef;
using tvm::runtime::Session;

namespace {

struct OpenSession {
  std::unique_ptr<Hub> hub;
  /*! \brief What its workers are invited with. */
  std::string invitation;
  Outbox outbox;
  /*! \brief Keeps the address, by which sessions are found, from being used again. */
  ffi::WeakObjectPtr<ffi::Object> session;

  OpenSession(const Session& session, const HubOptions& options, int64_t room)
      : hub(std::make_unique<Hub>(options)),
        invitation(hub->invitation()),
        outbox(room),
        session(ffi::details::ObjectUnsafe::ObjectPtrFromObjectRef<ffi::Object>(session)) {}
  ~OpenSession() { Mailbox::Global().Discard(this); }
};

class OpenSessions {
 public:
  static OpenSessions& Global() {
    // A process that was forked off starts with none: its parent's need threads that are not here.
    // No mutex, which another thread might have held in the parent.
    static std::atomic<OpenSessions*> latest{nullptr};
    OpenSessions* sessions = latest.load();
    if (sessions != nullptr && sessions->generation_ == Generation()) return *sessions;
    auto* fresh = new OpenSessions();
    if (latest.compare_exchange_strong(sessions, fresh)) return *fresh;
    delete fresh;
    return *sessions;
  }

  std::shared_ptr<OpenSession> Add(const Session& session, const HubOptions& options,
                                   int64_t room) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = sessions_.begin(); it != sessions_.end();) {
      it = it->second->hub->monitor().finished() ? sessions_.erase(it) : std::next(it);
    }
    if (sessions_.count(session.get())) {
      Fail(kind::kRuntime, "init_ccl: the session has been initialised already");
    }
    return sessions_[session.get()] = std::make_shared<OpenSession>(session, options, room);
  }

  std::shared_ptr<OpenSession> Get(const Session& session) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = sessions_.find(session.get());
    if (it == sessions_.end()) Fail(kind::kRuntime, "the session is not open");
    return it->second;
  }

  bool Invited(const Session& session, const std::string& invitation) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = sessions_.find(session.get());
    return it != sessions_.end() && it->second->invitation == invitation;
  }

  std::shared_ptr<OpenSession> Inviting(const std::string& invitation) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [session, open] : sessions_) {
      if (open->invitation == invitation) return open;
    }
    return nullptr;
  }

  void Remove(const Session& session) {
    std::shared_ptr<OpenSession> last;  // ends after the lock is gone
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = sessions_.find(session.get());
    if (it == sessions_.end()) return;
    last = std::move(it->second);
    sessions_.erase(it);
  }

 private:
  const uint32_t generation_ = Generation();
  std::mutex mutex_;
  std::map<const ffi::Object*, std::shared_ptr<OpenSession>> sessions_;
};

HubOptions& Defaults() {
  static HubOptions options;
  return options;
}

/*! \brief Let every worker join. */
void Invite(OpenSession& open, const Session& session, const std::string& join,
            const ffi::Shape& device_ids) {
  // Adopted, for a worker may end before these references do.
  DRef function = open.outbox.Adopt(session->GetGlobalFunc(join));
  open.outbox.Adopt(session->CallPacked(function, device_ids, ffi::Bytes(open.invitation)));
}

}  // namespace

namespace controller {

HubOptions WithDefaults(double timeout_seconds, int64_t arena_bytes) {
  HubOptions options = Defaults();
  if (timeout_seconds > 0) options.timeout_seconds = timeout_seconds;
  if (arena_bytes > 0) options.arena_bytes = static_cast<size_t>(arena_bytes);
  return options;
}

std::vector<NodePlace> PlacesOf(const ffi::Array<ffi::String>& names, const ffi::Shape& ranks) {
  if (names.size() != ranks.size()) {
    Fail(kind::kValue, "there are ", names.size(), " names of nodes, and ranks of ", ranks.size());
  }
  std::vector<NodePlace> places;
  for (size_t i = 0; i < names.size(); ++i) {
    places.push_back({std::string(names[i]), static_cast<int>(ranks[i])});
  }
  return places;
}

void Configure(double timeout_seconds, int64_t arena_bytes, std::string instruction_set) {
  Defaults().timeout_seconds = timeout_seconds;
  Defaults().arena_bytes = static_cast<size_t>(arena_bytes);
  Defaults().instruction_set = instruction_set;
}

void Open(Session session, const Backend& backend, const std::string& join,
          const Backend* otherwise, ffi::Shape device_ids, double timeout_seconds,
          int64_t arena_bytes, int64_t room) {
  HubOptions options = WithDefaults(timeout_seconds, arena_bytes);
  options.backend = &backend;
  options.otherwise = otherwise;
  options.num_ranks = static_cast<int>(session->GetNumWorkers());
  Invite(*OpenSessions::Global().Add(session, options, room), session, join, device_ids);
}

void OpenNodes(Session session, const Backend& backend, const std::string& join,
               ffi::Shape device_ids, double timeout_seconds, int64_t room,
               ffi::Array<ffi::String> names, ffi::Shape ranks, ffi::Array<ffi::Bytes> invitations,
               ffi::Shape links) {
  std::vector<File> sockets;
  for (int64_t link : links) sockets.emplace_back(static_cast<int>(link));
  HubOptions options = WithDefaults(timeout_seconds, 0);
  options.backend = &backend;
  options.num_ranks = static_cast<int>(session->GetNumWorkers());
  options.nodes = PlacesOf(names, ranks);
  const size_t count = options.nodes.size();
  if (invitations.size() != count || sockets.size() != count) {
    Fail(kind::kValue, "a session of ", count, " nodes has ", invitations.size(),
         " invitations of theirs, and ", sockets.size(), " connections to them");
  }
  auto open = OpenSessions::Global().Add(session, options, room);
  std::vector<NodeInvitation> invited;
  for (size_t node = 0; node < count; ++node) {
    invited.push_back({options.nodes[node].ranks, std::string(invitations[node])});
    open->hub->Attach(static_cast<int>(node), std::move(sockets[node]));
  }
  open->invitation = PackInvitations(invited);
  Invite(*open, session, join, device_ids);
}

bool WaitJoined(Session session, double seconds) {
  return OpenSessions::Global().Get(session)->hub->monitor().WaitJoined(seconds);
}

void Send(ffi::PackedArgs args, ffi::Any* result) {
  const Session session = args[0].cast<Session>();
  *result = OpenSessions::Global().Get(session)->outbox.Send(session, args.Slice(1));
}

DRef GetFunction(Session session, ffi::String name) {
  return OpenSessions::Global().Get(session)->outbox.Adopt(session->GetGlobalFunc(name));
}

void SendTicket(Session session, DRef done, int64_t ticket) {
  ffi::AnyView args[4];
  ffi::PackedArgs::Fill(args, 0, 0, done, ticket);
  OpenSessions::Global().Get(session)->outbox.SendTicket(session, ffi::PackedArgs(args, 4), ticket);
}

int Wait(Session session, int64_t ticket, double seconds) {
  auto open = OpenSessions::Global().Get(session);
  const Monitor::Progress progress =
      open->hub->monitor().WaitDone(static_cast<uint64_t>(ticket), seconds);
  if (progress == Monitor::Progress::kDone) open->outbox.Passed(ticket);
  return static_cast<int>(progress);
}

ffi::String Report(Session session) {
  const SessionReport report = OpenSessions::Global().Get(session)->hub->monitor().Report();
  auto numbers = [](const std::vector<int>& values) {
    ffi::Array<ffi::Any> array;
    for (int value : values) array.push_back(value);
    return array;
  };
  ffi::Array<ffi::Any> errors;
  for (const RankReport& error : report.errors) {
    ffi::Map<ffi::String, ffi::Any> json;
    json.Set("rank", error.rank);
    json.Set("kind", ffi::String(error.kind));
    json.Set("message", ffi::String(error.message));
    json.Set("traceback", ffi::String(error.traceback));
    errors.push_back(json);
  }
  ffi::Array<ffi::Any> refusals;
  for (const std::string& refusal : report.refusals) refusals.push_back(ffi::String(refusal));
  ffi::Map<ffi::String, ffi::Any> json;
  json.Set("joined", numbers(report.joined));
  json.Set("dead", numbers(report.dead));
  json.Set("left", numbers(report.left));
  ffi::Array<ffi::Any> done;
  for (uint64_t ticket : report.done) done.push_back(static_cast<int64_t>(ticket));
  json.Set("done", done);
  json.Set("pids", numbers(report.pids));
  json.Set("errors", errors);
  json.Set("refusals", refusals);
  json.Set("changed", ffi::String(report.changed));
  ffi::Array<ffi::Any> lost;
  for (const std::string& node : report.lost) lost.push_back(ffi::String(node));
  json.Set("lost", lost);
  return ffi::json::Stringify(json);
}

namespace {

/*! \brief A fetched value on its way; it is forgotten with the last who could take it. */
struct Parcel {
  int64_t key;
  std::weak_ptr<OpenSession> open;
  std::shared_ptr<Expected::Value> value = std::make_shared<Expected::Value>();

  Parcel(int64_t key, const std::shared_ptr<OpenSession>& open) : key(key), open(open) {
    Expected::Global().Want(key, value);
    open->hub->monitor().WantValue(static_cast<uint64_t>(key));
  }
  Parcel(const Parcel&) = delete;
  ~Parcel() {
    Expected::Global().Forget(key);
    if (auto session = open.lock()) session->hub->monitor().TakeValue(static_cast<uint64_t>(key));
  }
  ffi::Any Take() {
    if (value->came) return value->value;
    auto session = open.lock();
    if (!session) Fail(kind::kRuntime, "the session is not open");
    const std::string bytes = session->hub->monitor().TakeValue(static_cast<uint64_t>(key));
    if (bytes.empty()) Fail(kind::kRuntime, "no value came for key ", key);
    return UnpackValue(bytes);
  }
};

}  // namespace

ffi::Function Expect(Session session, int64_t key) {
  auto parcel = std::make_shared<Parcel>(key, OpenSessions::Global().Get(session));
  return ffi::Function::FromTyped([parcel]() -> ffi::Any { return parcel->Take(); });
}

bool HasInvited(const std::string& invitation) {
  return !invitation.empty() && OpenSessions::Global().Inviting(invitation) != nullptr;
}

bool ReportMissing(const std::string& invitation, const RankReport& error) {
  const auto open = OpenSessions::Global().Inviting(invitation);
  if (open != nullptr) open->hub->monitor().ReportError(error);
  return open != nullptr;
}

int TeamOfRanks(Session session, ffi::Shape ranks, int64_t copy) {
  auto open = OpenSessions::Global().Get(session);
  return open->hub->TeamOf(TeamMembers(ranks), TeamCopy(copy));
}

void Recover(Session session) {
  auto open = OpenSessions::Global().Get(session);
  Mailbox::Global().Discard(open.get());
  open->outbox.Passed(std::numeric_limits<int64_t>::max());
  open->hub->monitor().Recover();
}

void Abort(Session session) { OpenSessions::Global().Get(session)->hub->AbortClosed(); }

void Close(Session session) { OpenSessions::Global().Remove(session); }

bool WaitLeft(Session session, double seconds) {
  return OpenSessions::Global().Get(session)->hub->monitor().WaitLeft(seconds);
}

ffi::ObjectRef SessionOf(DRef reference) { return reference->session; }

int RankHere(ffi::Optional<Session> session) {
  const std::string& invitation = worker::OwnInvitation();
  if (invitation.empty() || !session.has_value()) return -1;
  if (!OpenSessions::Global().Invited(session.value(), invitation)) return -1;
  return RequireRank().id();
}

int64_t Put(Session session, ffi::Any value) {
  auto open = OpenSessions::Global().Get(session);
  return Mailbox::Global().Put(open.get(), std::move(value));
}

void FailAtExit() {
  // Python's own handlers come too early for this: the exit code is decided after them. In glibc
  // `exit` in a handler goes on with the handlers that are left. What this process forks is
  // another.
  static pid_t process = 0;
  if (process == getpid()) return;
  process = getpid();
  on_exit(
      [](int status, void*) {
        if (status == 0 && process == getpid()) std::exit(1);
      },
      nullptr);
}

}  // namespace controller

}  // namespace tvm_ipc
