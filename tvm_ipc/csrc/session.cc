/* SPDX-License-Identifier: Apache-2.0 */
/*! \file session.cc */
#include "session.h"

#include <sched.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/runtime/disco/disco_worker.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "collectives.h"
#include "hub.h"
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

/*! \brief How long workers may take to start and join a session that the user made. */
constexpr double kJoinSeconds = 120;

/*! \brief Values on their way between the controller and a worker of its own process. */
class Mailbox {
 public:
  static Mailbox& Global() {
    static Mailbox* mailbox = new Mailbox();
    return *mailbox;
  }
  /*! \brief Positive keys are made here; negative ones are the tickets of fetches. */
  int64_t Put(ffi::Any value) {
    std::lock_guard<std::mutex> lock(mutex_);
    values_[++last_] = std::move(value);
    return last_;
  }
  void Put(int64_t key, ffi::Any value) {
    std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = std::move(value);
  }
  bool Take(int64_t key, ffi::Any* value) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = values_.find(key);
    if (it == values_.end()) return false;
    *value = std::move(it->second);
    values_.erase(it);
    return true;
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, ffi::Any> values_;
  int64_t last_ = 0;
};

struct OpenSession {
  std::unique_ptr<Hub> hub;
  /*! \brief Mailbox keys that nobody may have collected. */
  std::set<int64_t> posted;
  /*! \brief Keeps the address, by which sessions are found, from being used again. */
  ffi::WeakObjectPtr<ffi::Object> session;

  OpenSession(const Session& session, const HubOptions& options)
      : hub(std::make_unique<Hub>(options)),
        session(ffi::details::ObjectUnsafe::ObjectPtrFromObjectRef<ffi::Object>(session)) {}
  ~OpenSession() { Discard(); }
  void Discard() {
    ffi::Any value;
    for (int64_t key : posted) Mailbox::Global().Take(key, &value);
    posted.clear();
  }
};

class OpenSessions {
 public:
  static OpenSessions& Global() {
    static OpenSessions* sessions = new OpenSessions();
    return *sessions;
  }

  void Add(const Session& session, const HubOptions& options) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = sessions_.begin(); it != sessions_.end();) {
      it = it->second->hub->finished() ? sessions_.erase(it) : std::next(it);
    }
    if (sessions_.count(session.get())) {
      Fail(kind::kRuntime, "init_ccl: the session has been initialised already");
    }
    sessions_[session.get()] = std::make_shared<OpenSession>(session, options);
  }

  std::shared_ptr<OpenSession> Get(const Session& session) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = sessions_.find(session.get());
    if (it == sessions_.end()) Fail(kind::kRuntime, "the session is not open");
    return it->second;
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

void Open(Session session, ffi::Shape device_ids, double timeout_seconds, int64_t arena_bytes) {
  HubOptions options = Defaults();
  options.num_ranks = static_cast<int>(session->GetNumWorkers());
  if (timeout_seconds > 0) options.timeout_seconds = timeout_seconds;
  if (arena_bytes > 0) options.arena_bytes = static_cast<size_t>(arena_bytes);
  OpenSessions::Global().Add(session, options);
  const std::string invitation = OpenSessions::Global().Get(session)->hub->invitation();
  // Detached, for a worker may end before these references do. Their registers stay taken.
  DRef join = session->GetGlobalFunc("runtime.disco.shm.init_ccl_per_worker");
  Detach(join);
  Detach(session->CallPacked(join, device_ids, ffi::Bytes(invitation)));
}

void InitCCL(Session session, ffi::Shape device_ids) {
  Open(session, device_ids, 0, 0);
  if (WaitJoined(session, kJoinSeconds)) return;
  const HubReport report = OpenSessions::Global().Get(session)->hub->TakeReport();
  std::ostringstream os;
  os << "init_ccl: " << report.joined.size() << " of " << report.pids.size()
     << " workers joined the session";
  for (const RankReport& error : report.errors) {
    os << "; rank " << error.rank << ": " << error.message;
  }
  for (const std::string& refusal : report.refusals) os << "; " << refusal;
  for (int rank : report.dead) os << "; rank " << rank << " ended";
  os << ". All workers must run on this machine, in one network namespace, with tvm_ipc"
     << " installed; the workers' own output may say more";
  Abort(session);
  Close(session);
  throw Error(kind::kRuntime, os.str());
}

bool WaitJoined(Session session, double seconds) {
  return OpenSessions::Global().Get(session)->hub->WaitJoined(seconds);
}

int Wait(Session session, int64_t ticket, double seconds) {
  return static_cast<int>(
      OpenSessions::Global().Get(session)->hub->WaitDone(static_cast<uint64_t>(ticket), seconds));
}

ffi::String Report(Session session) {
  const HubReport report = OpenSessions::Global().Get(session)->hub->TakeReport();
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

ffi::Any TakeValue(Session session, int64_t ticket) {
  ffi::Any value;
  if (Mailbox::Global().Take(-ticket, &value)) return value;
  const std::string bytes =
      OpenSessions::Global().Get(session)->hub->TakeValue(static_cast<uint64_t>(ticket));
  if (bytes.empty()) Fail(kind::kRuntime, "no value came for ticket ", ticket);
  return UnpackValue(bytes);
}

void Recover(Session session) {
  auto open = OpenSessions::Global().Get(session);
  open->Discard();
  open->hub->Recover();
}

void Abort(Session session) { OpenSessions::Global().Get(session)->hub->AbortClosed(); }

void Close(Session session) { OpenSessions::Global().Remove(session); }

bool WaitLeft(Session session, double seconds) {
  return OpenSessions::Global().Get(session)->hub->WaitLeft(seconds);
}

int64_t Detach(DRef reference) {
  auto* object = const_cast<tvm::runtime::DRefObj*>(reference.get());
  object->session = ffi::ObjectRef{nullptr};
  return object->reg_id;
}

void Release(Session session, int64_t reg) {
  // A protected member of a base class, named through a class that may name it.
  struct Access : tvm::runtime::SessionObj {
    using SessionObj::DeallocReg;
  };
  auto* object = const_cast<tvm::runtime::SessionObj*>(session.operator->());
  (object->*(&Access::DeallocReg))(static_cast<int>(reg));
}

int64_t Put(Session session, ffi::Any value) {
  auto open = OpenSessions::Global().Get(session);
  const int64_t key = Mailbox::Global().Put(std::move(value));
  open->posted.insert(key);
  return key;
}

void FailAtExit() {
  static std::once_flag once;
  // Python's own handlers come too early for this: the exit code is decided after them. In glibc
  // `exit` in a handler goes on with the handlers that are left.
  std::call_once(once, [] {
    on_exit(
        [](int status, void*) {
          if (status == 0) std::exit(1);
        },
        nullptr);
  });
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

std::string Ticket(int64_t ticket) {
  return std::string(reinterpret_cast<const char*>(&ticket), sizeof(ticket));
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
    // To throw would end the worker, in a user's session the controller too. The controller
    // misses this rank and says so.
    std::fprintf(stderr, "tvm_ipc: rank %d could not join its session: %s\n", worker->worker_id,
                 error.what());
    return;
  }
  worker->ccl = "shm";
}

void Guard(ffi::PackedArgs args, ffi::Any* result) {
  Rank& rank = RequireRank();
  if (rank.control().ranks[rank.id()].failed.load(std::memory_order_acquire) != 0) return;
  try {
    auto function = args[0].as<ffi::Function>();
    if (!function.has_value() || *function == nullptr) {
      Fail(kind::kType, "what is called is not a function but ", args[0].GetTypeKey(),
           "; the call that should have made it failed, or was skipped after an error");
    }
    function->CallPacked(args.Slice(1), result);
  } catch (const ffi::Error& error) {
    ReportError(rank, error.kind(), error.message(), error.TracebackMostRecentCallLast());
  } catch (const Error& error) {
    ReportError(rank, error.kind(), error.what(), "");
  } catch (const std::exception& error) {
    ReportError(rank, kind::kRuntime, error.what(), "");
  } catch (...) {
    ReportError(rank, kind::kRuntime, "an exception that is not a std::exception", "");
  }
}

void Done(int64_t ticket) { RequireRank().SendFrame(frame::kDone, Ticket(ticket)); }

void Fetch(ffi::Any value, int rank, int64_t ticket) {
  Rank& self = RequireRank();
  if (self.id() != rank) return;
  if (self.control().controller_pid == getpid()) {
    Mailbox::Global().Put(-ticket, std::move(value));
  } else {
    self.SendFrame(frame::kValue, Ticket(ticket) + PackValue(value));
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
  sched_getaffinity(0, sizeof(set), &set);
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
