/* SPDX-License-Identifier: Apache-2.0 */
/*! \file controller_session_functions.cc */
#include "disco/controller_session_functions.h"

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

#include "core/atfork_descriptors.h"
#include "core/thread_signals.h"
#include "core/worker_handshake.h"
#include "disco/command_queue_and_freed_references.h"
#include "disco/controller_worker0_value_exchange.h"
#include "disco/serialize_worker_values.h"
#include "disco/worker_session_functions.h"

namespace tvm_ipc {

namespace ffi = tvm::ffi;
using tvm::runtime::DRef;
using tvm::runtime::Session;

namespace {

struct OpenSession {
  std::unique_ptr<SessionServer> server;
  /*! \brief The invitation that its workers join with. */
  std::string invitation;
  CommandQueue command_queue;
  /*! \brief Prevents reuse of the session's address, which is the key of `OpenSessions`. */
  ffi::WeakObjectPtr<ffi::Object> session;

  OpenSession(const Session& session, const SessionServerOptions& options, int64_t room)
      : server(std::make_unique<SessionServer>(options)),
        invitation(server->invitation()),
        command_queue(room),
        session(ffi::details::ObjectUnsafe::ObjectPtrFromObjectRef<ffi::Object>(session)) {}
  ~OpenSession() { LocalValues::Global().Discard(this); }
};

class OpenSessions {
 public:
  static OpenSessions& Global() {
    // A forked process starts without sessions: its parent's need threads that it does not have.
    // There is no mutex here, because another thread of the parent may have held it.
    static std::atomic<OpenSessions*> latest{nullptr};
    OpenSessions* sessions = latest.load();
    if (sessions != nullptr && sessions->generation_ == Generation()) return *sessions;
    auto* fresh = new OpenSessions();
    if (latest.compare_exchange_strong(sessions, fresh)) return *fresh;
    delete fresh;
    return *sessions;
  }

  std::shared_ptr<OpenSession> Add(const Session& session, const SessionServerOptions& options,
                                   int64_t room) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = sessions_.begin(); it != sessions_.end();) {
      it = it->second->server->worker_table().finished() ? sessions_.erase(it) : std::next(it);
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

  bool HasInvitation(const Session& session, const std::string& invitation) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = sessions_.find(session.get());
    return it != sessions_.end() && it->second->invitation == invitation;
  }

  std::shared_ptr<OpenSession> FindByInvitation(const std::string& invitation) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [session, open] : sessions_) {
      if (open->invitation == invitation) return open;
    }
    return nullptr;
  }

  void Remove(const Session& session) {
    std::shared_ptr<OpenSession> last;  // destroyed after the lock is released
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

SessionServerOptions& Defaults() {
  static SessionServerOptions options;
  return options;
}

/*! \brief Let every worker join. */
void Invite(OpenSession& open, const Session& session, const std::string& join,
            const ffi::Shape& device_ids) {
  BlockSigpipe blocked;
  // Adopted, because a worker may end before these references do.
  DRef function = open.command_queue.Adopt(session->GetGlobalFunc(join));
  open.command_queue.Adopt(session->CallPacked(function, device_ids, ffi::Bytes(open.invitation)));
}

}  // namespace

namespace controller {

SessionServerOptions WithDefaults(double timeout_seconds, int64_t arena_bytes) {
  SessionServerOptions options = Defaults();
  if (timeout_seconds > 0) options.timeout_seconds = timeout_seconds;
  if (arena_bytes > 0) options.arena_bytes = static_cast<size_t>(arena_bytes);
  return options;
}

std::vector<NodeSpec> MakeNodeSpecs(const ffi::Array<ffi::String>& names, const ffi::Shape& ranks) {
  if (names.size() != ranks.size()) {
    Fail(kind::kValue, "got ", names.size(), " node names, but numbers of ranks for ", ranks.size(),
         " nodes; both must have one entry for each node");
  }
  std::vector<NodeSpec> nodes;
  for (size_t i = 0; i < names.size(); ++i) {
    nodes.push_back({std::string(names[i]), static_cast<int>(ranks[i])});
  }
  return nodes;
}

void Configure(double timeout_seconds, int64_t arena_bytes, std::string instruction_set) {
  Defaults().timeout_seconds = timeout_seconds;
  Defaults().arena_bytes = static_cast<size_t>(arena_bytes);
  Defaults().instruction_set = instruction_set;
}

void Open(Session session, const Backend& backend, const std::string& join,
          const Backend* otherwise, ffi::Shape device_ids, double timeout_seconds,
          int64_t arena_bytes, int64_t room) {
  SessionServerOptions options = WithDefaults(timeout_seconds, arena_bytes);
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
  SessionServerOptions options = WithDefaults(timeout_seconds, 0);
  options.backend = &backend;
  options.num_ranks = static_cast<int>(session->GetNumWorkers());
  options.nodes = MakeNodeSpecs(names, ranks);
  const size_t count = options.nodes.size();
  if (invitations.size() != count || sockets.size() != count) {
    Fail(kind::kValue, "a session of ", count, " nodes got ", invitations.size(),
         " invitations and ", sockets.size(), " connections; there must be one of each for a node");
  }
  auto open = OpenSessions::Global().Add(session, options, room);
  std::vector<NodeInvitation> invited;
  for (size_t node = 0; node < count; ++node) {
    invited.push_back({options.nodes[node].ranks, std::string(invitations[node])});
    open->server->Attach(static_cast<int>(node), std::move(sockets[node]));
  }
  open->invitation = PackInvitations(invited);
  Invite(*open, session, join, device_ids);
}

bool WaitJoined(Session session, double seconds) {
  return OpenSessions::Global().Get(session)->server->worker_table().WaitJoined(seconds);
}

void Send(ffi::PackedArgs args, ffi::Any* result) {
  const Session session = args[0].cast<Session>();
  *result = OpenSessions::Global().Get(session)->command_queue.Send(session, args.Slice(1));
}

DRef GetFunction(Session session, ffi::String name) {
  BlockSigpipe blocked;
  return OpenSessions::Global().Get(session)->command_queue.Adopt(session->GetGlobalFunc(name));
}

void SendTicket(Session session, DRef done, int64_t ticket) {
  ffi::AnyView args[4];
  ffi::PackedArgs::Fill(args, 0, 0, done, ticket);
  OpenSessions::Global().Get(session)->command_queue.SendTicket(session, ffi::PackedArgs(args, 4),
                                                                ticket);
}

int Wait(Session session, int64_t ticket, double seconds) {
  auto open = OpenSessions::Global().Get(session);
  const WorkerTable::Progress progress =
      open->server->worker_table().WaitDone(static_cast<uint64_t>(ticket), seconds);
  if (progress == WorkerTable::Progress::kDone) open->command_queue.Passed(ticket);
  return static_cast<int>(progress);
}

ffi::String Report(Session session) {
  const SessionReport report = OpenSessions::Global().Get(session)->server->worker_table().Report();
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

/*! \brief A value that is being fetched; forgotten when its last owner is destroyed. */
struct FetchedValue {
  int64_t key;
  std::weak_ptr<OpenSession> open;
  std::shared_ptr<HostFetches::Value> value = std::make_shared<HostFetches::Value>();

  FetchedValue(int64_t key, const std::shared_ptr<OpenSession>& open) : key(key), open(open) {
    HostFetches::Global().Want(key, value);
    open->server->worker_table().ExpectValue(static_cast<uint64_t>(key));
  }
  FetchedValue(const FetchedValue&) = delete;
  ~FetchedValue() {
    HostFetches::Global().Forget(key);
    if (auto session = open.lock())
      session->server->worker_table().TakeValue(static_cast<uint64_t>(key));
  }
  ffi::Any Take() {
    if (value->received) return value->value;
    auto session = open.lock();
    if (!session) Fail(kind::kRuntime, "the session is not open");
    const std::string bytes = session->server->worker_table().TakeValue(static_cast<uint64_t>(key));
    if (bytes.empty()) Fail(kind::kRuntime, "no value was received for key ", key);
    return UnpackValue(bytes);
  }
};

}  // namespace

ffi::Function Expect(Session session, int64_t key) {
  auto fetched = std::make_shared<FetchedValue>(key, OpenSessions::Global().Get(session));
  return ffi::Function::FromTyped([fetched]() -> ffi::Any { return fetched->Take(); });
}

bool HasInvited(const std::string& invitation) {
  return !invitation.empty() && OpenSessions::Global().FindByInvitation(invitation) != nullptr;
}

bool ReportMissing(const std::string& invitation, const RankReport& error) {
  const auto open = OpenSessions::Global().FindByInvitation(invitation);
  if (open != nullptr) open->server->worker_table().ReportError(error);
  return open != nullptr;
}

int TeamOfRanks(Session session, ffi::Shape ranks, int64_t copy) {
  auto open = OpenSessions::Global().Get(session);
  return open->server->TeamOf(TeamMembers(ranks), TeamCopy(copy));
}

void Recover(Session session) {
  auto open = OpenSessions::Global().Get(session);
  LocalValues::Global().Discard(open.get());
  open->command_queue.Passed(std::numeric_limits<int64_t>::max());
  open->server->worker_table().Recover();
}

void Abort(Session session) { OpenSessions::Global().Get(session)->server->AbortClosed(); }

void Close(Session session) { OpenSessions::Global().Remove(session); }

bool WaitLeft(Session session, double seconds) {
  return OpenSessions::Global().Get(session)->server->worker_table().WaitLeft(seconds);
}

ffi::ObjectRef SessionOf(DRef reference) { return reference->session; }

ffi::Function WeakReference(Session session) {
  using Unsafe = ffi::details::ObjectUnsafe;
  ffi::WeakObjectPtr<ffi::Object> weak(Unsafe::ObjectPtrFromObjectRef<ffi::Object>(session));
  return ffi::Function::FromTyped([weak](bool keep) -> ffi::Optional<ffi::ObjectRef> {
    auto locked = weak.lock();
    if (locked == nullptr) return std::nullopt;
    const auto result = Unsafe::ObjectRefFromObjectPtr<ffi::ObjectRef>(locked);
    if (keep) Unsafe::MoveObjectPtrToTVMFFIObjectPtr(std::move(locked));  // never released
    return result;
  });
}

int RankHere(ffi::Optional<Session> session) {
  const std::string& invitation = worker::OwnInvitation();
  if (invitation.empty() || !session.has_value()) return -1;
  if (!OpenSessions::Global().HasInvitation(session.value(), invitation)) return -1;
  return RequireRank().id();
}

int64_t Put(Session session, ffi::Any value) {
  auto open = OpenSessions::Global().Get(session);
  return LocalValues::Global().Put(open.get(), std::move(value));
}

void FailAtExit() {
  // Python's exit handlers run too early: the exit code is decided after them. In glibc an `exit`
  // in a handler continues with the remaining handlers. Forked children are not affected.
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
