/* SPDX-License-Identifier: Apache-2.0 */
/*! \file worker_session_functions.cc */
#include "disco/worker_session_functions.h"

#include <fcntl.h>
#include <tvm/ffi/container/array.h>
#include <tvm/runtime/disco/disco_worker.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/atfork_descriptors.h"
#include "core/teams.h"
#include "disco/controller_session_functions.h"
#include "disco/controller_worker0_value_exchange.h"
#include "disco/error_conversion.h"
#include "disco/per_stream_allocator.h"
#include "disco/tensor_to_buffer.h"

namespace tvm::runtime::threading {
// This function is exported, but the wheel lacks the header.
void SetMaxConcurrency(int value);
}  // namespace tvm::runtime::threading

namespace tvm_ipc {

namespace ffi = tvm::ffi;
using tvm::runtime::DiscoWorker;
using tvm::runtime::Tensor;

Rank& RequireRank() {
  Rank* rank = CurrentRank();
  if (rank == nullptr) {
    Fail(kind::kRuntime,
         "this function runs only in a worker of an initialised session: use tvm_ipc.Session, or"
         " call tvm_ipc.init_ccl(session) first");
  }
  if (rank->in_forked_child()) {
    Fail(kind::kRuntime, "this process was forked by worker ", rank->id(),
         "; a forked process is not a worker and cannot use the session");
  }
  return *rank;
}

std::vector<int> TeamMembers(const ffi::Shape& ranks) {
  std::vector<int> members;
  for (int64_t rank : ranks) {
    members.push_back(rank < 0 || rank > kMaxRanks ? -1 : static_cast<int>(rank));
  }
  return members;
}

uint32_t TeamCopy(int64_t copy) {
  if (copy < 0 || copy >= kAsyncTeamCopies) {
    Fail(kind::kValue, "team: the number of a copy is 0 to ", kAsyncTeamCopies - 1, ", not ", copy);
  }
  return static_cast<uint32_t>(copy);
}

namespace worker {

namespace {

/*! \brief Whether this is a worker process that the controller has started. */
bool serves_parent = false;

thread_local std::string own_invitation;

/*! \brief Call a function and ignore its error, which is a consequence of a reported one. */
template <typename Function>
void WithoutErrors(const Function& function) {
  try {
    function();
  } catch (const Error&) {
  }
}

/*! \brief Return the device of this worker that the backend works on; none for the CPU. */
std::optional<DLDevice> DeviceOfWorker(const Backend& backend, const DiscoWorker& worker,
                                       const ffi::Shape& device_ids) {
  const auto type = static_cast<DLDeviceType>(backend.capabilities().device_type);
  if (type == kDLCPU) return std::nullopt;
  const auto count = static_cast<int64_t>(device_ids.size());
  if (worker.local_worker_id >= count) {
    Fail(kind::kValue, "init_ccl_per_worker: ", count,
         " device_ids were passed, but this machine has", " a worker ", worker.local_worker_id,
         "; pass one for each of its workers");
  }
  const int64_t id = device_ids[worker.local_worker_id];
  if (id < 0 || id != static_cast<int>(id)) {
    Fail(kind::kValue, "init_ccl_per_worker: there is no device ", id);
  }
  return DLDevice{type, static_cast<int>(id)};
}

/*! \brief Initialise the device for TVM; return `RankOptions::queues_for_graphs`. */
int BringUp(const DLDevice& device, const DiscoWorker& worker, const ffi::Shape& device_ids) {
  int queues_for_graphs = 0;
  try {
    queues_for_graphs = ffi::Function::GetGlobalRequired("tvm_ipc.cuda.bring_up")().cast<int>();
  } catch (const ffi::Error& error) {  // raised in Python
    throw Error(kind::kRuntime, error.message());
  }
  // Several workers are threads of this process. Worker 0 may be the only thread of its process.
  if (!serves_parent && std::count(device_ids.begin(), device_ids.end(), device.device_id) > 1 &&
      !KeepBlocksByStream(device) && worker.local_worker_id != 0) {
    Fail(kind::kRuntime, "workers of this process share device ", device.device_id,
         ", and TVM has already run programs there with memory that they cannot share; open the"
         " session before the first program, or use workers that are processes");
  }
  return queues_for_graphs;
}

}  // namespace

void InitCCLPerWorker(const Backend& backend, const Backend& (*find)(const std::string& name),
                      ffi::Shape device_ids, ffi::Bytes invitation) {
  DiscoWorker* worker = DiscoWorker::ThreadLocal();
  if (CurrentRank() != nullptr || !worker->ccl.empty()) {
    Fail(kind::kRuntime, "init_ccl_per_worker: rank ", worker->worker_id,
         " has already been initialised",
         worker->ccl.empty() ? std::string() : " for " + std::string(worker->ccl));
  }
  // A thrown error would end the worker, and with a thread worker the controller too.
  auto report_missing = [&](const std::string& kind, const std::string& message) {
    const RankReport report{worker->worker_id, kind, message, ""};
    if (controller::ReportMissing(std::string(invitation), report)) return;
    std::fprintf(stderr, "tvm_ipc: rank %d could not join its session: %s\n", worker->worker_id,
                 message.c_str());
    // The parent process sees the exit and need not wait for the rank.
    if (serves_parent) _exit(1);
  };
  try {
    const std::optional<DLDevice> device = DeviceOfWorker(backend, *worker, device_ids);
    const std::string invited(invitation);
    const Home home = controller::HasInvited(invited) ? Home::kController : Home::kOwn;
    auto rank = Join(InvitationOf(invited, worker->worker_id), backend, worker->worker_id,
                     worker->num_workers, worker->num_groups, device ? device->device_id : 0, find,
                     home, [&](Rank& joining) {
                       if (!device) return;
                       joining.set_queues_for_graphs(BringUp(*device, *worker, device_ids));
                     });
    rank->backend().UseInstructionSet(rank->options().instruction_set);
    worker->ccl = rank->backend().name();
    SetCurrentRank(std::move(rank));
    own_invitation = invited;
    if (device && worker->default_device.device_type == kDLCPU) worker->default_device = *device;
  } catch (const Error& error) {
    return report_missing(error.kind(), error.what());
  } catch (const ffi::Error& error) {  // raised in Python
    return report_missing(error.kind(), error.message());
  }
}

const std::string& OwnInvitation() { return own_invitation; }

void ServeParent(int64_t read_fd, int64_t write_fd) {
  for (int64_t pipe : {read_fd, write_fd}) {
    // It was inherited; processes that this one starts must not inherit it.
    fcntl(static_cast<int>(pipe), F_SETFD, FD_CLOEXEC);
    KeepFromChildren(static_cast<int>(pipe));
  }
  serves_parent = true;
}

void Guard(ffi::PackedArgs args, ffi::Any* result) {
  Rank& rank = RequireRank();
  if (rank.control().ranks[rank.id()].failed.load(std::memory_order_acquire) != 0) return;
  // Clear a stale error, which would be taken for one of this call.
  if (TVMFFIObjectHandle stale = nullptr; true) {
    TVMFFIErrorMoveFromRaised(&stale);
    if (stale != nullptr) TVMFFIObjectDecRef(stale);
  }
  ReportErrors(rank, [&] {
    rank.endpoint().Follow(rank.control().generation.load(std::memory_order_acquire));
    auto function = args[0].as<ffi::Function>();
    if (!function.has_value() || *function == nullptr) {
      Fail(kind::kType, "the called object is not a function but ", args[0].GetTypeKey(),
           "; the call that should have created it failed, or was skipped after an error");
    }
    function->CallPacked(args.Slice(1), result);
    if (rank.endpoint().LeaveStreams()) {
      Fail(kind::kRuntime,
           "a function returned on another stream than the one on which it began;"
           " call tvm_ipc.set_stream(0) at its end, and wait for the other streams");
    }
    rank.endpoint().FinishCommand();
  });
  // After an error the thread may still be on another stream.
  WithoutErrors([&] { rank.endpoint().LeaveStreams(); });
}

void Done(int64_t ticket) {
  Rank& rank = RequireRank();
  // Errors of asynchronous operations and of the device are reported before the ticket.
  rank.Drain();
  auto settle = [&] { rank.endpoint().Settle(); };
  if (rank.control().ranks[rank.id()].failed.load(std::memory_order_acquire) == 0) {
    ReportErrors(rank, settle);
  } else {
    WithoutErrors(settle);  // its errors follow from a reported one
  }
  rank.connection().Send(FrameType::kDone, AsBytes(ticket));
}

ffi::Function GetGlobalFunc(ffi::String name) {
  auto function = ffi::Function::GetGlobal(name);
  if (!function.has_value()) {
    Fail(kind::kValue, "the worker has no global function ", std::string(name),
         "; call session.import_python_module(...) with a module that registers it; functions that"
         " need the compiler require tvm_ipc.Session(..., compiler=True)");
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

ffi::Any ConcatChunks(ffi::String kind, ffi::Array<ffi::Any> pieces) {
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

ffi::Any CallWithList(ffi::Function function, ffi::Array<ffi::Any> values) {
  std::vector<ffi::AnyView> views(values.begin(), values.end());
  ffi::Any result;
  function.CallPacked(ffi::PackedArgs(views.data(), static_cast<int32_t>(views.size())), &result);
  return result;
}

int TeamOfRanks(ffi::Shape ranks, int64_t copy) {
  return TeamOf(RequireRank(), TeamMembers(ranks), TeamCopy(copy));
}

int RankOfThread() { return RequireRank().id(); }

tvm::Device DeviceOfThread() { return DeviceOf(RequireRank()); }

void CallInTeam(ffi::PackedArgs args, ffi::Any* result) {
  const Rank& rank = RequireRank();
  const int id = args[1].cast<int>();
  const TeamRecord* team = FindTeam(rank, static_cast<TeamId>(id));
  if (team == nullptr) Fail(kind::kValue, "there is no team ", id);
  const uint8_t* end = team->ranks + team->size;
  if (std::find(team->ranks, end, rank.id()) == end) return;
  args[0].cast<ffi::Function>().CallPacked(args.Slice(2), result);
}

ffi::Optional<Tensor> EmptyResult(ffi::String collective, ffi::Optional<Tensor> source,
                                  ffi::Shape parts, int64_t root, int64_t team) {
  const Rank& rank = RequireRank();
  const std::string name(collective);
  const auto id = static_cast<TeamId>(team);
  const int64_t members = rank.SizeOf(id);
  const int64_t index = rank.TeamIndex(id, name.c_str());
  if (root >= 0 && root != index) return ffi::Optional<Tensor>();
  if (!source.has_value()) {
    Fail(kind::kValue, name, ": worker ", rank.id(), " has no tensor to send, so the shape of the",
         " result is unknown; the call that should have made it returned nothing");
  }
  const ffi::Shape sent = source.value().Shape();
  std::vector<int64_t> shape(sent.begin(), sent.end());
  const std::optional<Collective> found = FindCollective(name);
  const Relation relation = found ? TraitsOf(*found).relation : Relation::kEqual;
  if (relation == Relation::kRecvIsLarger) {
    if (shape.empty()) shape.push_back(1);
    shape[0] *= members;
  } else if (relation == Relation::kSendIsLarger) {
    if (shape.empty() || shape[0] % members != 0) {
      Fail(kind::kValue, name, ": src has ", shape.empty() ? "no axis" : "a first axis of extent ",
           shape.empty() ? "" : std::to_string(shape[0]), ", and the result is one of ", members,
           " equal slices of that axis; make it a multiple of ", members,
           ", or pass dst, a tensor with one slice of the elements");
    }
    shape[0] /= members;
  } else if (static_cast<int64_t>(parts.size()) == members * members) {
    // The collective refuses parts whose sum is beyond an int64.
    uint64_t received = 0;
    for (int64_t sender = 0; sender < members; ++sender) {
      received += static_cast<uint64_t>(parts[sender * members + index]);
    }
    if (members > 0 && !parts.empty() && received <= INT64_MAX) {
      shape = {static_cast<int64_t>(received)};
    }
  }
  return ffi::Function::GetGlobalRequired("runtime.disco.empty")(
             ffi::Shape(shape), source.value()->dtype, nullptr, /*worker0_only=*/false,
             /*in_group=*/true)
      .cast<ffi::Optional<Tensor>>();
}

ffi::Function ShareRank() {
  RequireRank();
  // A weak pointer, because the program may keep the returned function for any time.
  std::weak_ptr<Rank> shared = ShareCurrentRank();
  return ffi::Function::FromTyped([shared, invitation = own_invitation](bool acts) {
    WithErrors([&] {
      auto rank = shared.lock();
      if (rank == nullptr) Fail(kind::kRuntime, "the session of this rank has ended");
      if (acts) {
        ActFor(std::move(rank));
        RequireRank();
      } else {
        StopActing();
      }
      own_invitation = acts ? invitation : "";
    });
  });
}

void EmulateLink(double latency, double bandwidth, double jitter) {
  RequireRank().link().Set(latency, bandwidth, jitter);
}

void SetThreads(int threads) { tvm::runtime::threading::SetMaxConcurrency(threads); }

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
  // Without a backend, Disco knows the numbers, but only in the worker's own thread.
  const Rank* rank = CurrentRank();
  const DiscoWorker* worker = rank == nullptr ? DiscoWorker::ThreadLocal() : nullptr;
  const int num_workers = rank != nullptr ? rank->num_ranks() : worker->num_workers;
  const int num_groups =
      rank != nullptr ? rank->num_ranks() / rank->group_size() : worker->num_groups;
  if (num_workers == workers && num_groups == groups) return;
  auto size = [](int workers, int groups) {
    std::string text = std::to_string(workers) + (workers == 1 ? " worker" : " workers");
    return groups == 1 ? text : text + " in " + std::to_string(groups) + " groups";
  };
  Fail(kind::kValue, "the module was compiled for ", size(workers, groups),
       ", and this session has ", size(num_workers, num_groups),
       "; compile it for this session (world_size and num_groups of get_pipeline), or open a "
       "session of that size");
}

}  // namespace worker
}  // namespace tvm_ipc
