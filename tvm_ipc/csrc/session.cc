/* SPDX-License-Identifier: Apache-2.0 */
/*! \file session.cc */
#include "session.h"

#include <fcntl.h>
#include <sched.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/runtime/disco/disco_worker.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "collectives.h"
#include "forked.h"
#include "hub.h"
#include "outbox.h"
#include "tensor_view.h"
#include "value.h"

namespace tvm::runtime::threading {
// Exported, but the wheel lacks the header.
void SetMaxConcurrency(int value);
}  // namespace tvm::runtime::threading

namespace tvm_ipc {

namespace ffi = tvm::ffi;
using tvm::runtime::DiscoWorker;
using tvm::runtime::DRef;
using tvm::runtime::Session;
using tvm::runtime::Tensor;

namespace {

/*! \brief Values on their way between the controller and a worker of its own process. */
class Mailbox {
 public:
  static Mailbox& Global() {
    static Mailbox* mailbox = new Mailbox();
    return *mailbox;
  }
  /*! \brief Leave a value for a worker, until it takes it or the session discards it. */
  int64_t Put(const void* owner, ffi::Any value) {
    std::lock_guard<std::mutex> lock(mutex_);
    values_[++last_] = Letter{owner, std::move(value)};
    return last_;
  }
  bool Take(int64_t key, ffi::Any* value) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = values_.find(key);
    if (it == values_.end()) return false;
    *value = std::move(it->second.value);
    values_.erase(it);
    return true;
  }
  void Discard(const void* owner) {
    std::vector<ffi::Any> values;  // end after the lock is gone
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = values_.begin(); it != values_.end();) {
      if (it->second.owner == owner) values.push_back(std::move(it->second.value));
      it = it->second.owner == owner ? values_.erase(it) : std::next(it);
    }
  }

 private:
  struct Letter {
    const void* owner;
    ffi::Any value;
  };
  std::mutex mutex_;
  std::map<int64_t, Letter> values_;
  int64_t last_ = 0;
};

/*! \brief What a worker fetches for the controller: kept only as long as somebody wants it. */
class Expected {
 public:
  static Expected& Global() {
    static Expected* expected = new Expected();
    return *expected;
  }
  struct Value {
    bool came = false;
    ffi::Any value;
  };
  void Want(int64_t key, std::weak_ptr<Value> value) {
    std::lock_guard<std::mutex> lock(mutex_);
    wanted_[key] = std::move(value);
  }
  void Forget(int64_t key) {
    std::lock_guard<std::mutex> lock(mutex_);
    wanted_.erase(key);
  }
  void Deliver(int64_t key, ffi::Any value) {
    std::shared_ptr<Value> last;  // ends, if nobody else holds it, after the lock is gone
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = wanted_.find(key);
    if (it == wanted_.end() || !(last = it->second.lock())) return;
    last->came = true;
    last->value = std::move(value);
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::weak_ptr<Value>> wanted_;
};

struct OpenSession {
  std::unique_ptr<Hub> hub;
  Outbox outbox;
  /*! \brief Keeps the address, by which sessions are found, from being used again. */
  ffi::WeakObjectPtr<ffi::Object> session;

  OpenSession(const Session& session, const HubOptions& options, int64_t room)
      : hub(std::make_unique<Hub>(options)),
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

  void Add(const Session& session, const HubOptions& options, int64_t room) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = sessions_.begin(); it != sessions_.end();) {
      it = it->second->hub->finished() ? sessions_.erase(it) : std::next(it);
    }
    if (sessions_.count(session.get())) {
      Fail(kind::kRuntime, "init_ccl: the session has been initialised already");
    }
    sessions_[session.get()] = std::make_shared<OpenSession>(session, options, room);
  }

  std::shared_ptr<OpenSession> Get(const Session& session) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = sessions_.find(session.get());
    if (it == sessions_.end()) Fail(kind::kRuntime, "the session is not open");
    return it->second;
  }

  /*! \brief Say to the hub that sent the invitation, if it is in this process, why a rank is
   * missing. */
  bool ReportError(const std::string& invitation, const RankReport& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [session, open] : sessions_) {
      if (open->hub->invitation() != invitation) continue;
      open->hub->ReportError(error);
      return true;
    }
    return false;
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

}  // namespace

Rank& RequireRank() {
  Rank* rank = CurrentRank();
  if (rank == nullptr) {
    Fail(kind::kRuntime,
         "this function runs only in a worker of an initialised session: use tvm_ipc.Session, or"
         " call tvm_ipc.init_ccl(session) first");
  }
  if (rank->forked()) {
    Fail(kind::kRuntime, "this process was forked off worker ", rank->id(),
         "; it is no worker, and has no part in the session");
  }
  return *rank;
}

namespace controller {

void Configure(double timeout_seconds, int64_t arena_bytes, ffi::String instruction_set) {
  if (!UseInstructionSet(instruction_set)) {
    Fail(kind::kValue, "this machine has no instruction set ", std::string(instruction_set));
  }
  Defaults().timeout_seconds = timeout_seconds;
  Defaults().arena_bytes = static_cast<size_t>(arena_bytes);
  Defaults().instruction_set = instruction_set;
}

void Open(Session session, ffi::Shape device_ids, double timeout_seconds, int64_t arena_bytes,
          int64_t room) {
  HubOptions options = Defaults();
  options.num_ranks = static_cast<int>(session->GetNumWorkers());
  if (timeout_seconds > 0) options.timeout_seconds = timeout_seconds;
  if (arena_bytes > 0) options.arena_bytes = static_cast<size_t>(arena_bytes);
  OpenSessions::Global().Add(session, options, room);
  auto open = OpenSessions::Global().Get(session);
  // Adopted, for a worker may end before these references do.
  DRef join = open->outbox.Adopt(session->GetGlobalFunc("runtime.disco.shm.init_ccl_per_worker"));
  open->outbox.Adopt(session->CallPacked(join, device_ids, ffi::Bytes(open->hub->invitation())));
}

bool WaitJoined(Session session, double seconds) {
  return OpenSessions::Global().Get(session)->hub->WaitJoined(seconds);
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
  const Hub::Progress progress = open->hub->WaitDone(static_cast<uint64_t>(ticket), seconds);
  if (progress == Hub::Progress::kDone) open->outbox.Passed(ticket);
  return static_cast<int>(progress);
}

ffi::String Report(Session session) {
  const HubReport report = OpenSessions::Global().Get(session)->hub->Report();
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
    open->hub->WantValue(static_cast<uint64_t>(key));
  }
  Parcel(const Parcel&) = delete;
  ~Parcel() {
    Expected::Global().Forget(key);
    if (auto session = open.lock()) session->hub->TakeValue(static_cast<uint64_t>(key));
  }
  ffi::Any Take() {
    if (value->came) return value->value;
    auto session = open.lock();
    if (!session) Fail(kind::kRuntime, "the session is not open");
    const std::string bytes = session->hub->TakeValue(static_cast<uint64_t>(key));
    if (bytes.empty()) Fail(kind::kRuntime, "no value came for key ", key);
    return UnpackValue(bytes);
  }
};

}  // namespace

ffi::Function Expect(Session session, int64_t key) {
  auto parcel = std::make_shared<Parcel>(key, OpenSessions::Global().Get(session));
  return ffi::Function::FromTyped([parcel]() -> ffi::Any { return parcel->Take(); });
}

void Recover(Session session) {
  auto open = OpenSessions::Global().Get(session);
  Mailbox::Global().Discard(open.get());
  open->outbox.Passed(std::numeric_limits<int64_t>::max());
  open->hub->Recover();
}

void Abort(Session session) { OpenSessions::Global().Get(session)->hub->AbortClosed(); }

void Close(Session session) { OpenSessions::Global().Remove(session); }

bool WaitLeft(Session session, double seconds) {
  return OpenSessions::Global().Get(session)->hub->WaitLeft(seconds);
}

ffi::ObjectRef SessionOf(DRef reference) { return reference->session; }

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

namespace worker {

namespace {

void ReportError(Rank& rank, const std::string& kind, const std::string& message,
                 const std::string& traceback) {
  // The report first: the controller must not see the others' consequences before the cause.
  rank.SendFrame(frame::kError, PackError(kind, message, traceback));
  rank.FailSession();
}

std::string Number(int64_t number) {
  return std::string(reinterpret_cast<const char*>(&number), sizeof(number));
}

/*! \brief Whether this is a process of its own, started by the controller to be a worker. */
bool serves_parent = false;

/*! \brief End a process that was forked in a worker's function and did not end there. */
void LeaveIfForked(const Rank& rank, const char* error = "") {
  if (!rank.forked()) return;
  std::fprintf(stderr,
               "tvm_ipc: process %d, forked in a function of worker %d, came back from the function"
               " and ends here: it is no worker; end it with os._exit%s%s\n",
               getpid(), rank.id(), *error ? ". It had raised: " : "", error);
  _exit(1);
}

/*! \brief The two tensors of a copy between the controller and worker 0, ready to copy. */
Tensor TakeHostTensor(const char* what, int64_t key, const ffi::Optional<Tensor>& remote) {
  ffi::Any value;
  if (!Mailbox::Global().Take(key, &value)) {
    Fail(kind::kRuntime, what, ": the controller's array is gone");
  }
  Tensor host = value.cast<Tensor>();
  if (!remote.has_value()) {
    Fail(kind::kValue, what,
         ": worker 0 has no tensor there; the call that should have made it"
         " returned nothing");
  }
  const Tensor& other = remote.value();
  const ElementType a{host->dtype.code, host->dtype.bits, host->dtype.lanes};
  const ElementType b{other->dtype.code, other->dtype.bits, other->dtype.lanes};
  if (host.Shape().Product() != other.Shape().Product() || a != b) {
    Fail(kind::kValue, what, ": the controller's array has ", host.Shape().Product(), " x ",
         Name(a), ", worker 0's has ", other.Shape().Product(), " x ", Name(b));
  }
  return host;
}

}  // namespace

void InitCCLPerWorker(ffi::Shape device_ids, ffi::Bytes invitation) {
  DiscoWorker* worker = DiscoWorker::ThreadLocal();
  if (CurrentRank() != nullptr || !worker->ccl.empty()) {
    Fail(kind::kRuntime, "init_ccl_per_worker: rank ", worker->worker_id,
         " has been initialised already",
         worker->ccl.empty() ? std::string() : " for " + std::string(worker->ccl));
  }
  try {
    SetCurrentRank(Join(Invitation::Unpack(std::string(invitation)), worker->worker_id,
                        worker->num_workers, worker->num_groups));
  } catch (const Error& error) {
    // To throw would end the worker, in a user's session the controller too.
    const RankReport report{worker->worker_id, error.kind(), error.what(), ""};
    if (OpenSessions::Global().ReportError(std::string(invitation), report)) return;
    std::fprintf(stderr, "tvm_ipc: rank %d could not join its session: %s\n", worker->worker_id,
                 error.what());
    // Whoever started this process sees its end, and need not wait for the rank.
    if (serves_parent) _exit(1);
    return;
  }
  worker->ccl = "shm";
}

void ServeParent(int64_t read_fd, int64_t write_fd) {
  for (int64_t pipe : {read_fd, write_fd}) {
    // It came here by being left open; what this process starts has no business with it.
    fcntl(static_cast<int>(pipe), F_SETFD, FD_CLOEXEC);
    KeepFromChildren(static_cast<int>(pipe));
  }
  serves_parent = true;
}

void Guard(ffi::PackedArgs args, ffi::Any* result) {
  Rank& rank = RequireRank();
  if (rank.control().ranks[rank.id()].failed.load(std::memory_order_acquire) != 0) return;
  // What an earlier error left behind must not be taken for one of this call.
  if (TVMFFIObjectHandle stale = nullptr; true) {
    TVMFFIErrorMoveFromRaised(&stale);
    if (stale != nullptr) TVMFFIObjectDecRef(stale);
  }
  try {
    auto function = args[0].as<ffi::Function>();
    if (!function.has_value() || *function == nullptr) {
      Fail(kind::kType, "what is called is not a function but ", args[0].GetTypeKey(),
           "; the call that should have made it failed, or was skipped after an error");
    }
    function->CallPacked(args.Slice(1), result);
    LeaveIfForked(rank);
  } catch (const ffi::Error& error) {
    LeaveIfForked(rank, error.get() == nullptr ? "an exception" : error.what());
    if (error.get() == nullptr) {
      ReportError(rank, kind::kRuntime,
                  "a Python exception whose text cannot be told: its __str__ raised, or returned"
                  " what cannot be encoded; the worker's own output above says more",
                  "");
      return;
    }
    ReportError(rank, error.kind(), error.message(), error.TracebackMostRecentCallLast());
  } catch (const Error& error) {
    LeaveIfForked(rank, error.what());
    ReportError(rank, error.kind(), error.what(), "");
  } catch (const std::bad_alloc&) {
    ReportError(rank, kind::kMemory, "the system has no memory for what was to be allocated", "");
  } catch (const std::exception& error) {
    ReportError(rank, kind::kRuntime, error.what(), "");
  } catch (...) {
    ReportError(rank, kind::kRuntime, "an exception that is not a std::exception", "");
  }
}

void Done(int64_t ticket) { RequireRank().SendFrame(frame::kDone, Number(ticket)); }

void Fetch(ffi::Any value, int rank, int64_t key) {
  Rank& self = RequireRank();
  if (self.id() != rank) return;
  if (self.control().controller_pid == getpid()) {
    Expected::Global().Deliver(key, std::move(value));
  } else {
    self.SendFrame(frame::kValue, Number(key) + PackValue(value));
  }
}

void CopyFromHost(int64_t key, int receiver, ffi::Optional<Tensor> target) {
  Rank& rank = RequireRank();
  if (rank.id() == receiver && receiver == 0) {
    Tensor host = TakeHostTensor("copy to worker 0", key, target);
    target.value().CopyFrom(host);
  } else if (rank.id() == 0) {
    ffi::Any value;
    if (!Mailbox::Global().Take(key, &value))
      Fail(kind::kRuntime, "the controller's array is gone");
    Send(rank, ViewBuffer("the controller's array", value.cast<Tensor>().operator->()), receiver);
  } else if (rank.id() == receiver) {
    if (!target.has_value()) {
      Fail(kind::kValue, "copy to worker ", receiver,
           ": it has no tensor there; the call that"
           " should have made it returned nothing");
    }
    Receive(rank, ViewBuffer("the worker's tensor", target.value().operator->()), 0);
  }
}

void CopyToHost(int64_t key, ffi::Optional<Tensor> source) {
  if (RequireRank().id() != 0) return;
  Tensor host = TakeHostTensor("copy_from_worker_0", key, source);
  host.CopyFrom(source.value());
}

ffi::Function GetGlobalFunc(ffi::String name) {
  auto function = ffi::Function::GetGlobal(name);
  if (!function.has_value()) {
    Fail(kind::kValue, "the worker has no global function ", std::string(name),
         ": session.import_python_module(...) a module that registers it; functions that need"
         " the compiler want tvm_ipc.Session(..., compiler=True)");
  }
  return *function;
}

ffi::Function FindFunction(ffi::String name) {
  auto function = ffi::Function::GetGlobal(name);
  if (function.has_value()) return *function;
  return ffi::Function::FromPacked([name](ffi::PackedArgs, ffi::Any*) { GetGlobalFunc(name); });
}

void Append(ffi::PackedArgs args, ffi::Any* result) {
  ffi::Array<ffi::Any> values;
  if (auto before = args[0].as<ffi::Array<ffi::Any>>()) values = *before;
  for (int i = 1; i < args.size(); ++i) values.push_back(args[i]);
  *result = std::move(values);
}

ffi::Any JoinPieces(ffi::String kind, ffi::Array<ffi::Any> pieces) {
  std::string bytes;
  for (const ffi::Any& piece : pieces) {
    const ffi::Bytes part = piece.cast<ffi::Bytes>();
    bytes.append(part.data(), part.size());
  }
  if (kind == "str") return ffi::String(std::move(bytes));
  if (kind == "bytes") return ffi::Bytes(std::move(bytes));
  std::vector<int64_t> extents(bytes.size() / sizeof(int64_t));
  memcpy(extents.data(), bytes.data(), extents.size() * sizeof(int64_t));
  return ffi::Shape(extents);
}

void CallWithList(ffi::PackedArgs args, ffi::Any* result) {
  const ffi::Array<ffi::Any> values = args[1].cast<ffi::Array<ffi::Any>>();
  std::vector<ffi::AnyView> views(values.begin(), values.end());
  args[0].cast<ffi::Function>().CallPacked(
      ffi::PackedArgs(views.data(), static_cast<int32_t>(views.size())), result);
}

void SetThreads(int threads) {
  if (threads == 1) {
    // No pool at all: its threads would spin before they sleep, on cores that ranks wait for, and
    // the worker would wait for that when it ends.
    tvm::runtime::threading::SetMaxConcurrency(1);
    return;
  }
  // By default TVM binds a thread that runs kernels to the first `threads` cores of the machine,
  // every worker to the same ones. Let them move over all cores that this process may use.
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) {  // refused, as some sandboxes do
    for (long core = 0; core < sysconf(_SC_NPROCESSORS_ONLN); ++core) CPU_SET(core, &set);
  }
  ffi::Array<ffi::String> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(std::to_string(core));
  }
  constexpr int kShareAllCores = -3;
  ffi::Function::GetGlobalRequired("runtime.config_threadpool")(kShareAllCores, threads, cores);
}

ffi::Function GetFunction(ffi::Module module, ffi::String name) {
  auto function = module->GetFunction(name, /*query_imports=*/true);
  if (!function.has_value()) {
    Fail(kind::kValue, "the module has no function ", std::string(name));
  }
  return *function;
}

void CallIfPresent(ffi::Module module, ffi::String name) {
  auto function = module->GetFunction(name, /*query_imports=*/true);
  if (function.has_value()) (*function)();
}

void RequireWorkers(int workers, int groups) {
  const DiscoWorker* worker = DiscoWorker::ThreadLocal();
  if (worker->num_workers == workers && worker->num_groups == groups) return;
  auto size = [](int workers, int groups) {
    std::string text = std::to_string(workers) + (workers == 1 ? " worker" : " workers");
    return groups == 1 ? text : text + " in " + std::to_string(groups) + " groups";
  };
  Fail(kind::kValue, "the module was compiled for ", size(workers, groups),
       ", and this session has ", size(worker->num_workers, worker->num_groups),
       "; compile it for this session (world_size and num_groups of get_pipeline), or open a "
       "session of that size");
}

}  // namespace worker
}  // namespace tvm_ipc
