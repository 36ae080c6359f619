/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file register.cc
 * \brief The table of packed functions, the only C++ source with their names.
 *        `tvm_ipc/packed_functions` lists them with their types and effects; a test compares both.
 */
#include <sys/mman.h>
#include <sys/syscall.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/json.h>
#include <unistd.h>

#include "backends.h"
#include "blas/attention_packed_function.h"
#include "blas/batch_attention_packed_function.h"
#include "blas/kernel_threads.h"
#include "blas/matmul_packed_function.h"
#include "constants_repeated_in_python.h"
#include "core/atfork_descriptors.h"
#include "core/machine_name_and_memory.h"
#include "core/redirect_dead_worker_pipes.h"
#include "core/thread_signals.h"
#include "disco/collectives_as_packed_functions.h"
#include "disco/controller_session_functions.h"
#include "disco/exposed_tensors_and_slices.h"
#include "disco/node_session_functions.h"
#include "disco/per_stream_allocator.h"
#include "disco/start_async_packed_functions.h"
#include "disco/storage.h"
#include "disco/tensor_to_buffer.h"
#include "disco/typed_to_packed_function.h"
#include "disco/worker_pipes.h"
#include "disco/worker_session_functions.h"
#include "engine/serve_mpi_for_node_agent.h"
#include "start_session_with_backend.h"

namespace tvm_ipc {

namespace {

namespace ffi = tvm::ffi;

/*!
 * \brief A function of a worker, whose first parameter is the calling thread's rank.
 *
 * If it belongs to a backend, it fails in sessions of other backends.
 */
template <auto function>
struct OfWorker;
template <typename Result, typename... Args, Result (*function)(Rank&, Args...)>
struct OfWorker<function> {
  static constexpr const Signature& kSignature = SignatureOf<Result, Args...>::kValue;

  static void Run(const PackedCall& call, ffi::Any* result) {
    auto with_rank = [&](Args... args) {
      return function(RequireRankOf(call.backend), std::move(args)...);
    };
    CallWithArguments<Result, Args...>(call, result, with_rank, std::index_sequence_for<Args...>());
  }
};

/*! \brief The strategy of upstream's all-reduce, which has no parameter for its team. */
struct StrategyInGroup : parameter::AllReduceStrategy {
  static void Set(Call& call, const Rank& rank, Type strategy) {
    AllReduceStrategy::Set(call, rank, strategy);
    call.team = FindTeamFor(rank, int64_t{kGroup});
  }
};

/*! \brief Upstream's all-reduce, among the ranks of the caller's group. */
using CustomAllReduce =
    AsPacked<Collective::kAllReduce, parameter::Send, StrategyInGroup, parameter::Recv>;

void SendToWorker(Rank& rank, ffi::TensorView send, int64_t receiver) {
  const int to = IntOf("send_to_worker", receiver);
  rank.endpoint().Send(ViewBuffer(rank, send, "send_to_worker: send"), to);
}

void RecvFromWorker(Rank& rank, ffi::TensorView recv, int64_t sender) {
  const int from = IntOf("recv_from_worker", sender);
  rank.endpoint().Receive(ViewBuffer(rank, recv, "recv_from_worker: recv"), from);
}

void RecvFromWorker0(Rank& rank, ffi::TensorView recv) {
  if (rank.id() == 0) Fail(kind::kValue, "recv_from_worker0: rank 0 is the caller itself");
  rank.endpoint().Receive(ViewBuffer(rank, recv, "recv_from_worker0: recv"), 0);
}

void SendToNextGroup(Rank& rank, ffi::TensorView send) {
  const int receiver = rank.id() + rank.group_size();
  if (receiver >= rank.num_ranks()) {
    Fail(kind::kValue, "send_to_next_group: rank ", rank.id(), " is in the last group");
  }
  rank.endpoint().Send(ViewBuffer(rank, send, "send_to_next_group: send"), receiver);
}

void RecvFromPrevGroup(Rank& rank, ffi::TensorView recv) {
  const int sender = rank.id() - rank.group_size();
  if (sender < 0) {
    Fail(kind::kValue, "recv_from_prev_group: rank ", rank.id(), " is in the first group");
  }
  rank.endpoint().Receive(ViewBuffer(rank, recv, "recv_from_prev_group: recv"), sender);
}

void SetStream(Rank& rank, int64_t stream) { rank.endpoint().SetStream(stream); }

void WaitStream(Rank& rank, int64_t stream) { rank.endpoint().WaitStream(stream); }

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
 * \brief Write the team index of the rank to a tensor.
 *
 * With a tensor, kernels that read the index depend on this call as on all data. A shape would not
 * order them: passes of TVM move kernels before the call that returns it.
 */
void WriteTeamIndex(Rank& rank, TeamArgument team, ffi::TensorView recv) {
  const Buffer buffer = ViewBuffer(rank, recv, "team_index: recv");
  const DLDataType dtype = recv.dtype();
  if (dtype.code != kDLInt || dtype.bits != 64 || dtype.lanes != 1 || buffer.count != 1) {
    Fail(kind::kType, "team_index: recv is one int64");
  }
  const TeamId id = FindTeamFor(rank, team);
  // Beyond the last shard of the team, so that a rank outside of it has zeros for its shard.
  const int64_t index =
      id == kNoTeam ? team.get<ffi::Shape>()[0] : rank.TeamIndex(id, "team_index");
  rank.endpoint().WriteNumber(index, buffer);
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

ffi::String NcclInfo() { return FactsOfLibrary("nccl"); }

ffi::String CudaInfo() { return FindBackend("cuda").Info(); }

ffi::String CudaProbe(ffi::Shape devices) {
  return FindBackend("cuda").Probe(std::vector<int>(devices.begin(), devices.end()));
}

ffi::String CompiledCcl() { return BackendOfMachine().name(); }

void KeepFile(int64_t file) { KeepFromChildren(static_cast<int>(file)); }

/*! \brief Call a function that writes to Disco's pipes and sockets; see BlockSigpipe. */
void CallWithoutSigpipe(ffi::PackedArgs args, ffi::Any* result) {
  const auto function = args[0].cast<ffi::Function>();
  BlockSigpipe blocked;
  function.CallPacked(args.Slice(1), result);
}

void CloseKeptFile(int64_t file) { CloseKept(static_cast<int>(file)); }

/*! \brief Register the collectives with all parameters, which programs call or start. */
void RegisterCollectives() {
  using namespace parameter;  // NOLINT: the list has their plain names
#define TVM_IPC_REGISTER(Name, text, relation, mpi, cuda, nccl, ...)   \
  Define<AsPacked<Collective::k##Name, __VA_ARGS__>>("tvm_ipc." text); \
  MakeStartable("tvm_ipc." text);
  TVM_IPC_COLLECTIVES(TVM_IPC_REGISTER)
#undef TVM_IPC_REGISTER
}

/*! \brief Register the collectives of a backend that Disco dispatches to. */
void RegisterCollectivesOfDisco(const std::string& prefix, const Backend* backend) {
  using namespace parameter;  // NOLINT: as above
#define TVM_IPC_REGISTER(text, Name, ...) \
  Define<AsPacked<Collective::k##Name, __VA_ARGS__>>(prefix + text, backend);
  TVM_IPC_COLLECTIVES_OF_DISCO(TVM_IPC_REGISTER)
#undef TVM_IPC_REGISTER
}

/*! \brief Register the functions of a backend, with the signatures that Disco's dispatch to. */
void RegisterBackend(const Backend* backend) {
  const std::string prefix = PrefixOf(*backend);
  Define<OfBackend<InitWorker>>(prefix + "init_ccl_per_worker", backend);
  RegisterCollectivesOfDisco(prefix, backend);
  Define<OfWorker<RecvFromWorker0>>(prefix + "recv_from_worker0", backend);
  Define<OfWorker<SendToNextGroup>>(prefix + "send_to_next_group", backend);
  Define<OfWorker<RecvFromPrevGroup>>(prefix + "recv_from_prev_group", backend);
  Define<OfWorker<SendToWorker>>(prefix + "send_to_worker", backend);
  Define<OfWorker<RecvFromWorker>>(prefix + "recv_from_worker", backend);
  Define<OfWorker<SyncWorker>>(prefix + "sync_worker", backend);
  Define<OfWorker<ExerciseGroups>>(prefix + "test_send_to_next_group_recv_from_prev_group",
                                   backend);
  Define<OfWorker<ExerciseSend>>(prefix + "test_worker2_sends_to_worker0", backend);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ReplaceThreadsOfTvm();
  for (const Backend* backend : Backends()) RegisterBackend(backend);
  RegisterCollectives();
  Define<Plain<CompiledCcl>>("runtime.disco.compiled_ccl");
  Define<Plain<AllocStorage>>("runtime.disco.cuda_ipc.alloc_storage");
  Define<CustomAllReduce>("runtime.disco.cuda_ipc.custom_allreduce");
  Define<Plain<ClearArena>>("runtime.disco.cuda_ipc.cuda_ipc_memory_allocator_clear");
  Define<Variadic<Start>>("tvm_ipc.start");
  Define<Plain<Wait>>("tvm_ipc.wait");
  Define<OfWorker<SetStream>>("tvm_ipc.set_stream");
  Define<OfWorker<WaitStream>>("tvm_ipc.wait_stream");
  Define<OfWorker<ExposeTensor>>("tvm_ipc.expose");
  Define<OfWorker<PeerViewTensor>>("tvm_ipc.peer_view");
  Define<Variadic<ReleaseTensors>>("tvm_ipc.release");
  Define<OfWorker<OwnSliceTensor>>("tvm_ipc.own_slice");
  Define<Variadic<ReduceSlices>>("tvm_ipc.reduce_slices");
  Define<Variadic<AssembleSlices>>("tvm_ipc.assemble");
  Define<Plain<worker::TeamOfRanks>>("tvm_ipc.team");
  Define<OfWorker<WriteTeamIndex>>("tvm_ipc.team_index");
  Define<Plain<AllocTensor>>("tvm_ipc.alloc_tensor");
  Define<Plain<ViewTensor>>("tvm_ipc.view");
  Define<Plain<RequireBounds>>("tvm_ipc.require_bounds");
  Define<Plain<CopyTensor>>("tvm_ipc.copy");
  Define<Variadic<BlasMatmul>>("tvm_ipc.blas.matmul");
  Define<Variadic<CpuAttention>>("tvm_ipc.blas.attention");
  Define<Variadic<CpuAttentionOfSequences>>("tvm_ipc.blas.attention_of_sequences");
  Define<Variadic<CpuBatchAttention>>("tvm_ipc.blas.batch_attention");
  Define<Plain<BlasInfo>>("tvm_ipc.blas.info");
  Define<Plain<UseBlasKernels>>("tvm_ipc.blas.use_kernels");
  Define<Plain<ArenaStatistics>>("tvm_ipc.arena_stats");
  Define<Plain<ArenaOffset>>("tvm_ipc.arena_offset");
  Define<Plain<BytesReceived>>("tvm_ipc.bytes_received");
  // TVM looks up this name for every device.
  Define<Plain<FindDeviceAllocator>>("DeviceAllocator.");
  Define<Plain<RefusalOf>>("tvm_ipc.refusal");
  Define<Plain<UseLibrary>>("tvm_ipc.use_library");
  Define<Plain<NcclInfo>>("tvm_ipc.nccl.info");
  Define<Plain<CudaInfo>>("tvm_ipc.cuda.info");
  Define<Plain<CudaProbe>>("tvm_ipc.cuda.probe");
  Define<Plain<NativeInfo>>("tvm_ipc.native_info");
  Define<Plain<Numbers>>("tvm_ipc.numbers");
  Define<Plain<Configure>>("tvm_ipc.configure");
  Define<Plain<Open>>("tvm_ipc.session.open");
  Define<Plain<OpenNodes>>("tvm_ipc.session.open_nodes");
  Define<Plain<OpenNode>>("tvm_ipc.node.open");
  Define<Plain<node::InvitationTo>>("tvm_ipc.node.invitation");
  Define<Plain<node::Attach>>("tvm_ipc.node.attach");
  Define<Plain<node::Close>>("tvm_ipc.node.close");
  Define<Plain<node::RingOf>>("tvm_ipc.node.ring");
  Define<Plain<node::ServeMpi>>("tvm_ipc.node.serve_mpi");
  Define<Plain<node::Stop>>("tvm_ipc.node.stop");
  Define<Plain<node::LargestTag>>("tvm_ipc.node.largest_tag");
  Define<Plain<controller::WaitJoined>>("tvm_ipc.session.wait_joined");
  Define<Variadic<controller::Send>>("tvm_ipc.session.send");
  Define<Plain<controller::SendTicket>>("tvm_ipc.session.send_ticket");
  Define<Plain<controller::GetFunction>>("tvm_ipc.session.get_function");
  Define<Plain<controller::Wait>>("tvm_ipc.session.wait");
  Define<Plain<controller::Report>>("tvm_ipc.session.report");
  Define<Plain<controller::Expect>>("tvm_ipc.session.expect");
  Define<Plain<controller::TeamOfRanks>>("tvm_ipc.session.team");
  Define<Plain<controller::Recover>>("tvm_ipc.session.recover");
  Define<Plain<controller::Abort>>("tvm_ipc.session.abort");
  Define<Plain<controller::Close>>("tvm_ipc.session.close");
  Define<Plain<controller::WaitLeft>>("tvm_ipc.session.wait_left");
  Define<Plain<controller::Put>>("tvm_ipc.session.put");
  Define<Plain<controller::FailAtExit>>("tvm_ipc.session.fail_at_exit");
  Define<Plain<controller::RankHere>>("tvm_ipc.session.rank_here");
  Define<Plain<controller::SessionOf>>("tvm_ipc.session.of");
  Define<Plain<controller::WeakReference>>("tvm_ipc.session.weak_reference");
  Define<Plain<CreateProcessPool>>("tvm_ipc.create_process_pool");
  Define<Plain<OfferPipes>>("tvm_ipc.pool.offer");
  Define<Plain<PipesHungUp>>("tvm_ipc.pool.hung_up");
  Define<Plain<MutePipes>>("tvm_ipc.pool.mute");
  Define<Plain<ClosePipes>>("tvm_ipc.pool.close");
  Define<Plain<RetryInDestructor>>("tvm_ipc.pool.retry_in_destructor");
  Define<Plain<WatchPipe>>("tvm_ipc.pipes.watch");
  Define<Plain<ClosePipe>>("tvm_ipc.pipes.close");
  Define<Variadic<CallWithoutSigpipe>>("tvm_ipc.call_without_sigpipe");
  Define<Plain<KeepFile>>("tvm_ipc.keep_from_children");
  Define<Plain<CloseKeptFile>>("tvm_ipc.close_kept");
  Define<Plain<worker::ServeParent>>("tvm_ipc.worker.serve_parent");
  Define<Variadic<worker::Guard>>("tvm_ipc.worker.guard");
  Define<Plain<worker::Done>>("tvm_ipc.worker.done");
  Define<Plain<worker::Fetch>>("tvm_ipc.worker.fetch");
  Define<Plain<worker::FetchLimited>>("tvm_ipc.worker.fetch_limited");
  Define<Plain<worker::TensorOfBytes>>("tvm_ipc.worker.tensor_of_bytes");
  Define<Plain<worker::TakeFromHost>>("tvm_ipc.worker.take_from_host");
  Define<Plain<worker::CopyFromHost>>("tvm_ipc.worker.copy_from_host");
  Define<Plain<worker::CopyToHost>>("tvm_ipc.worker.copy_to_host");
  Define<Plain<worker::GetGlobalFunc>>("tvm_ipc.worker.get_global_func");
  Define<Plain<worker::FindFunction>>("tvm_ipc.worker.find_function");
  Define<Variadic<worker::Append>>("tvm_ipc.worker.append");
  Define<Plain<worker::ConcatChunks>>("tvm_ipc.worker.concat_chunks");
  Define<Plain<worker::CallWithList>>("tvm_ipc.worker.call_with_list");
  Define<Variadic<worker::CallInTeam>>("tvm_ipc.worker.call_in_team");
  Define<Plain<worker::EmptyResult>>("tvm_ipc.worker.empty_result");
  Define<Plain<worker::RankOfThread>>("tvm_ipc.worker.rank");
  Define<Plain<worker::DeviceOfThread>>("tvm_ipc.worker.device");
  Define<Plain<worker::ShareRank>>("tvm_ipc.worker.share_rank");
  Define<Plain<worker::EmulateLink>>("tvm_ipc.worker.emulate_link");
  Define<Plain<worker::SetThreads>>("tvm_ipc.worker.set_threads");
  Define<Plain<worker::GetFunction>>("tvm_ipc.worker.get_function");
  Define<Plain<worker::CallIfPresent>>("tvm_ipc.worker.call_if_present");
  Define<Plain<worker::RequireWorkers>>("tvm_ipc.require_workers");
}

}  // namespace
}  // namespace tvm_ipc
