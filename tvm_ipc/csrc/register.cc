/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file register.cc
 * \brief The table of packed functions, and nothing else that knows their names.
 *        `tvm_ipc/contract` lists them with their types and effects, and a test compares.
 */
#include <sys/mman.h>
#include <sys/syscall.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/reflection/registry.h>
#include <unistd.h>

#include "backends.h"
#include "blas/blas.h"
#include "core/forked.h"
#include "core/machine.h"
#include "core/worker_pipes.h"
#include "disco/as_packed.h"
#include "disco/device_allocator.h"
#include "disco/errors.h"
#include "disco/posting.h"
#include "disco/session.h"
#include "disco/shows.h"
#include "disco/storage.h"
#include "disco/tensor_view.h"
#include "disco/worker.h"
#include "numbers.h"

namespace tvm_ipc {

namespace {

namespace ffi = tvm::ffi;

/*! \brief The function, with the core's errors as TVM's. */
template <auto function>
struct Throwing;
template <typename Result, typename... Args, Result (*function)(Args...)>
struct Throwing<function> {
  static Result Call(Args... args) {
    return WithErrors([&] { return function(std::move(args)...); });
  }
};

/*! \brief The same of a function that reads its arguments itself. */
template <void (*function)(ffi::PackedArgs, ffi::Any*)>
struct ThrowingPacked {
  static void Call(ffi::PackedArgs args, ffi::Any* result) {
    WithErrors([&] { function(args, result); });
  }
};

/*!
 * \brief A function of a worker, which gets its rank first.
 *
 * With a backend it refuses to run in the sessions of others.
 */
template <auto function>
struct OfWorker;
template <typename Result, typename... Args, Result (*function)(Rank&, Args...)>
struct OfWorker<function> {
  const Backend* backend = nullptr;

  Result operator()(Args... args) const {
    return WithErrors([&] { return function(RequireRankOf(backend), std::move(args)...); });
  }
};

Buffer View(const Rank& rank, const char* what, const ffi::TensorView& tensor) {
  return ViewBuffer(rank, what, tensor);
}

using Optional = ffi::Optional<ffi::Tensor>;

void PlainAllReduce(Rank& rank, ffi::TensorView send, int64_t kind, TeamArgument team,
                    ffi::TensorView recv) {
  const ReduceKind reduction = ReduceKindOf("allreduce", kind);
  rank.endpoint().AllReduce(View(rank, "allreduce: send", send), reduction, TeamFor(rank, team),
                            Strategy::kRing, 0, View(rank, "allreduce: recv", recv));
}

void PlainAllGather(Rank& rank, ffi::TensorView send, TeamArgument team, ffi::TensorView recv) {
  rank.endpoint().AllGather(View(rank, "allgather: send", send), TeamFor(rank, team), 0,
                            View(rank, "allgather: recv", recv));
}

void PlainBroadcast(Rank& rank, Optional send, TeamArgument team, ffi::TensorView recv) {
  const Passed<const Buffer*> from(rank, "broadcast", true, send);
  rank.endpoint().Broadcast(from.value, 0, TeamFor(rank, team), 0,
                            View(rank, "broadcast: recv", recv));
}

void PlainScatter(Rank& rank, Optional send, TeamArgument team, ffi::TensorView recv) {
  const Passed<const Buffer*> from(rank, "scatter", true, send);
  rank.endpoint().Scatter(from.value, 0, TeamFor(rank, team), 0, View(rank, "scatter: recv", recv));
}

void PlainGather(Rank& rank, ffi::TensorView send, TeamArgument team, Optional recv) {
  const Passed<const Buffer*> to(rank, "gather", false, recv);
  rank.endpoint().Gather(View(rank, "gather: send", send), 0, TeamFor(rank, team), 0, to.value);
}

void CustomAllReduce(Rank& rank, ffi::TensorView send, int64_t strategy, ffi::TensorView recv) {
  if (rank.group_size() != rank.num_ranks()) {
    Fail(kind::kValue, "custom_allreduce does not say whether it means all ", rank.num_ranks(),
         " workers or the ", rank.group_size(),
         " of a group; compile with num_groups=", rank.num_ranks() / rank.group_size(),
         ", which calls tvm_ipc.allreduce instead");
  }
  const Strategy way = StrategyOf("allreduce", strategy);
  rank.endpoint().AllReduce(View(rank, "allreduce: send", send), ReduceKind::kSum, kWorld, way, 0,
                            View(rank, "allreduce: recv", recv));
}

void AllReduceRMSNorm(Rank& rank, ffi::TensorView send, ffi::TensorView residual,
                      ffi::TensorView weight, double epsilon, TeamArgument team, int64_t strategy,
                      int64_t flags, ffi::TensorView residual_out, ffi::TensorView norm_out) {
  // Whole names, which take no time to put together.
  rank.endpoint().AllReduceNorm(
      View(rank, "allreduce_rms_norm: send", send),
      View(rank, "allreduce_rms_norm: residual", residual),
      {View(rank, "allreduce_rms_norm: weight", weight), nullptr, epsilon}, TeamFor(rank, team),
      StrategyOf("allreduce_rms_norm", strategy), FlagsOf("allreduce_rms_norm", flags),
      View(rank, "allreduce_rms_norm: residual_out", residual_out),
      View(rank, "allreduce_rms_norm: norm_out", norm_out));
}

void AllReduceLayerNorm(Rank& rank, ffi::TensorView send, ffi::TensorView residual,
                        ffi::TensorView weight, ffi::TensorView bias, double epsilon,
                        TeamArgument team, int64_t strategy, int64_t flags,
                        ffi::TensorView residual_out, ffi::TensorView norm_out) {
  const Buffer shift = View(rank, "allreduce_layer_norm: bias", bias);
  rank.endpoint().AllReduceNorm(
      View(rank, "allreduce_layer_norm: send", send),
      View(rank, "allreduce_layer_norm: residual", residual),
      {View(rank, "allreduce_layer_norm: weight", weight), &shift, epsilon}, TeamFor(rank, team),
      StrategyOf("allreduce_layer_norm", strategy), FlagsOf("allreduce_layer_norm", flags),
      View(rank, "allreduce_layer_norm: residual_out", residual_out),
      View(rank, "allreduce_layer_norm: norm_out", norm_out));
}

void SendToWorker(Rank& rank, ffi::TensorView send, int64_t receiver) {
  const int to = IntOf("send_to_worker", receiver);
  rank.endpoint().Send(View(rank, "send_to_worker: send", send), to);
}

void RecvFromWorker(Rank& rank, ffi::TensorView recv, int64_t sender) {
  const int from = IntOf("recv_from_worker", sender);
  rank.endpoint().Receive(View(rank, "recv_from_worker: recv", recv), from);
}

void RecvFromWorker0(Rank& rank, ffi::TensorView recv) {
  if (rank.id() == 0) Fail(kind::kValue, "recv_from_worker0: rank 0 is the caller itself");
  rank.endpoint().Receive(View(rank, "recv_from_worker0: recv", recv), 0);
}

void SendToNextGroup(Rank& rank, ffi::TensorView send) {
  const int receiver = rank.id() + rank.group_size();
  if (receiver >= rank.num_ranks()) {
    Fail(kind::kValue, "send_to_next_group: rank ", rank.id(), " is in the last group");
  }
  rank.endpoint().Send(View(rank, "send_to_next_group: send", send), receiver);
}

void RecvFromPrevGroup(Rank& rank, ffi::TensorView recv) {
  const int sender = rank.id() - rank.group_size();
  if (sender < 0) {
    Fail(kind::kValue, "recv_from_prev_group: rank ", rank.id(), " is in the first group");
  }
  rank.endpoint().Receive(View(rank, "recv_from_prev_group: recv", recv), sender);
}

void SyncWorker(Rank& rank) { rank.endpoint().Synchronise(); }

void RequireTwoPairs(const Rank& rank) {
  if (rank.num_ranks() != 4 || rank.group_size() != 2) {
    Fail(kind::kValue, "this exercise wants 4 workers in 2 groups");
  }
}

void ExerciseGroups(Rank& rank, ffi::TensorView buffer) {
  RequireTwoPairs(rank);
  return rank.id() < 2 ? SendToNextGroup(rank, buffer) : RecvFromPrevGroup(rank, buffer);
}

void ExerciseSend(Rank& rank, ffi::TensorView buffer) {
  RequireTwoPairs(rank);
  if (rank.id() == 2) SendToWorker(rank, buffer, 0);
  if (rank.id() == 0) RecvFromWorker(rank, buffer, 2);
}

/*!
 * \brief Write the place of a rank in a team.
 *
 * Into a tensor, since kernels that read it then depend on it as on all data: passes of TVM move
 * kernels in front of what tells them a shape.
 */
void PlaceInTeam(Rank& rank, TeamArgument team, ffi::TensorView recv) {
  const Buffer buffer = View(rank, "place_in_team: recv", recv);
  const DLDataType dtype = recv.dtype();
  if (dtype.code != kDLInt || dtype.bits != 64 || dtype.lanes != 1 || buffer.count != 1) {
    Fail(kind::kType, "place_in_team: recv is one int64");
  }
  rank.endpoint().WriteNumber(rank.PlaceIn(TeamFor(rank, team), "place_in_team"), buffer);
}

/*! \brief The beginning of the names of a backend's functions. */
std::string PrefixOf(const Backend& backend) { return Text("runtime.disco.", backend.name(), "."); }

void Open(controller::Session session, ffi::String backend, ffi::Shape device_ids,
          double timeout_seconds, int64_t arena_bytes, int64_t room) {
  const Backend& found = FindBackend(backend);
  controller::Open(session, found, PrefixOf(found) + "init_ccl_per_worker", device_ids,
                   timeout_seconds, arena_bytes, room);
}

void Configure(double timeout_seconds, int64_t arena_bytes, ffi::String instruction_set) {
  for (const Backend* backend : Backends()) {
    if (!backend->UseInstructionSet(instruction_set)) {
      Fail(kind::kValue, "this machine has no instruction set ", std::string(instruction_set));
    }
  }
  controller::Configure(timeout_seconds, arena_bytes, instruction_set);
}

ffi::String NativeInfo() {
  auto texts = [](const std::vector<std::string>& values) {
    ffi::Array<ffi::Any> array;
    for (const std::string& value : values) array.push_back(ffi::String(value));
    return array;
  };
  const Backend& backend = FindBackend("auto");
  const int file = memfd_create("tvm_ipc probe", MFD_CLOEXEC);
  const int process = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
  ffi::Map<ffi::String, ffi::Any> json;
  json.Set("instruction_sets", texts(backend.instruction_sets()));
  json.Set("instruction_set", ffi::String(backend.instruction_set()));
  json.Set("memfd", file >= 0);
  json.Set("pidfd", process >= 0);
  json.Set("cores", AvailableCores());
  json.Set("physical_memory", static_cast<int64_t>(PhysicalMemory()));
  json.Set("default_arena_limit", static_cast<int64_t>(DefaultArenaBytes(2)));
  json.Set("max_workers", kMaxRanks);
  if (file >= 0) close(file);
  if (process >= 0) close(process);
  return ffi::json::Stringify(json);
}

ffi::String RefusalOf(ffi::String backend, ffi::Shape device_ids) {
  return FindBackend(backend).Refusal(std::vector<int>(device_ids.begin(), device_ids.end()));
}

ffi::String FactsOfLibrary(ffi::String backend) {
  const LibraryFacts facts = FindBackend(backend).FactsOfLibrary();
  ffi::Map<ffi::String, ffi::Any> json;
  json.Set("version", facts.version);
  json.Set("path", ffi::String(facts.path));
  json.Set("reason", ffi::String(facts.reason));
  return ffi::json::Stringify(json);
}

void UseLibrary(ffi::String backend, ffi::String path) { FindBackend(backend).UseLibrary(path); }

ffi::String CudaProbe(ffi::Shape devices) {
  return FindBackend("cuda").Probe(std::vector<int>(devices.begin(), devices.end()));
}

/*! \brief The functions of a backend, in the form that Disco's own dispatch to. */
void RegisterBackend(const Backend* backend) {
  const std::string prefix = PrefixOf(*backend);
  tvm::ffi::reflection::GlobalDef all;
  auto def = [&](const char* name, auto function) {
    function.backend = backend;
    all.def((prefix + name).c_str(), function);
  };
  all.def((prefix + "init_ccl_per_worker").c_str(),
          [backend](ffi::Shape device_ids, ffi::Bytes invitation) {
            WithErrors([&] { worker::InitCCLPerWorker(*backend, device_ids, invitation); });
          });
  def("allreduce", OfWorker<PlainAllReduce>());
  def("allgather", OfWorker<PlainAllGather>());
  def("broadcast_from_worker0", OfWorker<PlainBroadcast>());
  def("scatter_from_worker0", OfWorker<PlainScatter>());
  def("gather_to_worker0", OfWorker<PlainGather>());
  def("recv_from_worker0", OfWorker<RecvFromWorker0>());
  def("send_to_next_group", OfWorker<SendToNextGroup>());
  def("recv_from_prev_group", OfWorker<RecvFromPrevGroup>());
  def("send_to_worker", OfWorker<SendToWorker>());
  def("recv_from_worker", OfWorker<RecvFromWorker>());
  def("sync_worker", OfWorker<SyncWorker>());
  def("test_send_to_next_group_recv_from_prev_group", OfWorker<ExerciseGroups>());
  def("test_worker2_sends_to_worker0", OfWorker<ExerciseSend>());
}

/*! \brief Collectives with teams and flags, which programs call or post. */
void RegisterCollectives() {
  tvm::ffi::reflection::GlobalDef all;
  auto def = [&](const char* name, auto function) {
    all.def(name, function);
    MakePostable(name);
  };
  def("tvm_ipc.allreduce", AsPacked<&Endpoint::AllReduce>("allreduce"));
  def("tvm_ipc.allreduce_rms_norm", OfWorker<AllReduceRMSNorm>());
  def("tvm_ipc.allreduce_layer_norm", OfWorker<AllReduceLayerNorm>());
  def("tvm_ipc.reduce_scatter", AsPacked<&Endpoint::ReduceScatter>("reduce_scatter"));
  def("tvm_ipc.reduce", AsPacked<&Endpoint::Reduce>("reduce"));
  def("tvm_ipc.all_to_all", AsPacked<&Endpoint::AllToAll>("all_to_all"));
  def("tvm_ipc.allgather", AsPacked<&Endpoint::AllGather>("allgather"));
  def("tvm_ipc.broadcast", AsPacked<&Endpoint::Broadcast>("broadcast"));
  def("tvm_ipc.scatter", AsPacked<&Endpoint::Scatter>("scatter"));
  def("tvm_ipc.gather", AsPacked<&Endpoint::Gather>("gather"));
  def("tvm_ipc.permute", AsPacked<&Endpoint::Permute>("permute"));
}

TVM_FFI_STATIC_INIT_BLOCK() {
  for (const Backend* backend : Backends()) RegisterBackend(backend);
  RegisterCollectives();
  tvm::ffi::reflection::GlobalDef()
      .def("runtime.disco.compiled_ccl", [] { return ffi::String(BackendOfMachine().name()); })
      .def("runtime.disco.cuda_ipc.alloc_storage", Throwing<AllocStorage>::Call)
      .def("runtime.disco.cuda_ipc.custom_allreduce", OfWorker<CustomAllReduce>())
      .def("runtime.disco.cuda_ipc.cuda_ipc_memory_allocator_clear", Throwing<ClearArena>::Call)
      .def_packed("tvm_ipc.post", ThrowingPacked<Post>::Call)
      .def("tvm_ipc.wait", Throwing<Wait>::Call)
      .def("tvm_ipc.show", OfWorker<ShowTensor>())
      .def("tvm_ipc.peer", OfWorker<PeerTensor>())
      .def_packed("tvm_ipc.hide", ThrowingPacked<HideTensors>::Call)
      .def("tvm_ipc.part", OfWorker<PartTensor>())
      .def_packed("tvm_ipc.reduce_parts", ThrowingPacked<ReduceParts>::Call)
      .def_packed("tvm_ipc.join", ThrowingPacked<JoinParts>::Call)
      .def("tvm_ipc.team", Throwing<worker::TeamOfRanks>::Call)
      .def("tvm_ipc.place_in_team", OfWorker<PlaceInTeam>())
      .def("tvm_ipc.alloc_tensor", Throwing<AllocTensor>::Call)
      .def("tvm_ipc.view", Throwing<ViewTensor>::Call)
      .def("tvm_ipc.require_bounds", Throwing<RequireBounds>::Call)
      .def("tvm_ipc.copy", Throwing<CopyTensor>::Call)
      .def_packed("tvm_ipc.blas.matmul", ThrowingPacked<BlasMatmul>::Call)
      .def("tvm_ipc.blas.info", Throwing<BlasInfo>::Call)
      .def("tvm_ipc.blas.use_kernels", Throwing<UseBlasKernels>::Call)
      .def("tvm_ipc.arena_stats", Throwing<ArenaStatistics>::Call)
      .def("tvm_ipc.arena_offset", Throwing<ArenaOffset>::Call)
      // The name that TVM asks for, whatever the device.
      .def("DeviceAllocator.", Throwing<FindDeviceAllocator>::Call)
      .def("tvm_ipc.refusal", Throwing<RefusalOf>::Call)
      .def("tvm_ipc.use_library", Throwing<UseLibrary>::Call)
      .def("tvm_ipc.nccl.info", [] { return FactsOfLibrary("nccl"); })
      .def("tvm_ipc.cuda.info", [] { return ffi::String(FindBackend("cuda").Info()); })
      .def("tvm_ipc.cuda.probe", Throwing<CudaProbe>::Call)
      .def("tvm_ipc.native_info", Throwing<NativeInfo>::Call)
      .def("tvm_ipc.numbers", Throwing<Numbers>::Call)
      .def("tvm_ipc.configure", Throwing<Configure>::Call)
      .def("tvm_ipc.session.open", Throwing<Open>::Call)
      .def("tvm_ipc.session.wait_joined", Throwing<controller::WaitJoined>::Call)
      .def_packed("tvm_ipc.session.send", ThrowingPacked<controller::Send>::Call)
      .def("tvm_ipc.session.send_ticket", Throwing<controller::SendTicket>::Call)
      .def("tvm_ipc.session.get_function", Throwing<controller::GetFunction>::Call)
      .def("tvm_ipc.session.wait", Throwing<controller::Wait>::Call)
      .def("tvm_ipc.session.report", Throwing<controller::Report>::Call)
      .def("tvm_ipc.session.expect", Throwing<controller::Expect>::Call)
      .def("tvm_ipc.session.team", Throwing<controller::TeamOfRanks>::Call)
      .def("tvm_ipc.session.recover", Throwing<controller::Recover>::Call)
      .def("tvm_ipc.session.abort", Throwing<controller::Abort>::Call)
      .def("tvm_ipc.session.close", Throwing<controller::Close>::Call)
      .def("tvm_ipc.session.wait_left", Throwing<controller::WaitLeft>::Call)
      .def("tvm_ipc.session.put", Throwing<controller::Put>::Call)
      .def("tvm_ipc.session.fail_at_exit", Throwing<controller::FailAtExit>::Call)
      .def("tvm_ipc.session.rank_here", Throwing<controller::RankHere>::Call)
      .def("tvm_ipc.session.of", Throwing<controller::SessionOf>::Call)
      .def("tvm_ipc.pipes.watch", Throwing<WatchPipe>::Call)
      .def("tvm_ipc.pipes.close", Throwing<ClosePipe>::Call)
      .def("tvm_ipc.keep_from_children",
           [](int64_t file) { KeepFromChildren(static_cast<int>(file)); })
      .def("tvm_ipc.close_kept", [](int64_t file) { CloseKept(static_cast<int>(file)); })
      .def("tvm_ipc.worker.serve_parent", Throwing<worker::ServeParent>::Call)
      .def_packed("tvm_ipc.worker.guard", worker::Guard)
      .def("tvm_ipc.worker.done", Throwing<worker::Done>::Call)
      .def("tvm_ipc.worker.fetch", Throwing<worker::Fetch>::Call)
      .def("tvm_ipc.worker.copy_from_host", Throwing<worker::CopyFromHost>::Call)
      .def("tvm_ipc.worker.copy_to_host", Throwing<worker::CopyToHost>::Call)
      .def("tvm_ipc.worker.get_global_func", Throwing<worker::GetGlobalFunc>::Call)
      .def("tvm_ipc.worker.find_function", Throwing<worker::FindFunction>::Call)
      .def_packed("tvm_ipc.worker.append", ThrowingPacked<worker::Append>::Call)
      .def("tvm_ipc.worker.join_pieces", Throwing<worker::JoinPieces>::Call)
      .def("tvm_ipc.worker.call_with_list", Throwing<worker::CallWithList>::Call)
      .def_packed("tvm_ipc.worker.call_in_team", ThrowingPacked<worker::CallInTeam>::Call)
      .def("tvm_ipc.worker.rank", Throwing<worker::RankOfThread>::Call)
      .def("tvm_ipc.worker.device", Throwing<worker::DeviceOfThread>::Call)
      .def("tvm_ipc.worker.share_rank", Throwing<worker::ShareRank>::Call)
      .def("tvm_ipc.worker.emulate_link", Throwing<worker::EmulateLink>::Call)
      .def("tvm_ipc.worker.set_threads", Throwing<worker::SetThreads>::Call)
      .def("tvm_ipc.worker.get_function", Throwing<worker::GetFunction>::Call)
      .def("tvm_ipc.worker.call_if_present", Throwing<worker::CallIfPresent>::Call)
      .def("tvm_ipc.require_workers", Throwing<worker::RequireWorkers>::Call);
}

}  // namespace
}  // namespace tvm_ipc
