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

#include "blas/blas.h"
#include "core/forked.h"
#include "core/machine.h"
#include "core/worker_pipes.h"
#include "disco/session.h"
#include "disco/storage.h"
#include "disco/tensor_view.h"
#include "disco/worker.h"
#include "numbers.h"
#include "shm/collectives.h"

namespace tvm_ipc {

namespace {

namespace ffi = tvm::ffi;
using OptionalTensor = ffi::Optional<ffi::Tensor>;

/*! \brief The function, with the core's errors as TVM's. */
template <auto function>
struct Throwing;
template <typename Result, typename... Args, Result (*function)(Args...)>
struct Throwing<function> {
  static Result Call(Args... args) {
    try {
      return function(std::move(args)...);
    } catch (const Error& error) {
      throw ffi::Error(error.kind(), error.what(), "");
    }
  }
};

/*! \brief The same of a function that reads its arguments itself. */
template <void (*function)(ffi::PackedArgs, ffi::Any*)>
struct ThrowingPacked {
  static void Call(ffi::PackedArgs args, ffi::Any* result) {
    try {
      function(args, result);
    } catch (const Error& error) {
      throw ffi::Error(error.kind(), error.what(), "");
    }
  }
};

/*! \brief A buffer, or nothing. */
struct MaybeBuffer {
  Buffer buffer;
  bool present;
  MaybeBuffer(const char* what, const OptionalTensor& tensor) : present(tensor.has_value()) {
    if (present) buffer = ViewBuffer(what, tensor.value().GetDLTensorPtr());
  }
  const Buffer* get() const { return present ? &buffer : nullptr; }
};

void CheckAllReduce(int kind, int strategy, int flags) {
  if (kind < 0 || kind > 4) {
    Fail(kind::kValue, "allreduce: there is no reduction ", kind,
         "; 0 to 4 are sum, prod, min,"
         " max, avg");
  }
  if (strategy < 0 || strategy > 3) {
    Fail(kind::kValue, "allreduce: there is no strategy ", strategy,
         "; 0 to 3 are ring, one-shot, two-shot, auto");
  }
  if ((flags & ~static_cast<int>(kNoExitBarrier)) != 0) {
    Fail(kind::kValue, "allreduce: unknown flags ", flags);
  }
}

void AllReduceWithAll(ffi::TensorView send, int kind, int team, int strategy, int flags,
                      ffi::TensorView recv) {
  CheckAllReduce(kind, strategy, flags);
  AllReduce(RequireRank(), team, ViewBuffer("allreduce: send", send),
            ViewBuffer("allreduce: recv", recv), static_cast<ReduceKind>(kind),
            static_cast<Strategy>(strategy), static_cast<uint8_t>(flags));
}

void PlainAllReduce(ffi::TensorView send, int kind, int team, ffi::TensorView recv) {
  AllReduceWithAll(send, kind, team, static_cast<int>(Strategy::kRing), 0, recv);
}

void CustomAllReduce(ffi::TensorView send, int strategy, ffi::TensorView recv) {
  const Rank& rank = RequireRank();
  if (rank.group_size() != rank.num_ranks()) {
    Fail(kind::kValue, "custom_allreduce does not say whether it means all ", rank.num_ranks(),
         " workers or the ", rank.group_size(),
         " of a group; compile with num_groups=", rank.num_ranks() / rank.group_size(),
         ", which calls tvm_ipc.allreduce instead");
  }
  AllReduceWithAll(send, static_cast<int>(ReduceKind::kSum), kWorld, strategy, 0, recv);
}

void PlainAllGather(ffi::TensorView send, int team, ffi::TensorView recv) {
  AllGather(RequireRank(), team, ViewBuffer("allgather: send", send),
            ViewBuffer("allgather: recv", recv));
}

void BroadcastFromWorker0(OptionalTensor send, int team, ffi::TensorView recv) {
  MaybeBuffer source("broadcast: send", send);
  Broadcast(RequireRank(), team, source.get(), ViewBuffer("broadcast: recv", recv));
}

void ScatterFromWorker0(OptionalTensor send, int team, ffi::TensorView recv) {
  MaybeBuffer source("scatter: send", send);
  Scatter(RequireRank(), team, source.get(), ViewBuffer("scatter: recv", recv));
}

void GatherToWorker0(ffi::TensorView send, int team, OptionalTensor recv) {
  MaybeBuffer target("gather: recv", recv);
  Gather(RequireRank(), team, ViewBuffer("gather: send", send), target.get());
}

void SendToWorker(ffi::TensorView send, int receiver) {
  Send(RequireRank(), ViewBuffer("send_to_worker: send", send), receiver);
}

void RecvFromWorker(ffi::TensorView recv, int sender) {
  Receive(RequireRank(), ViewBuffer("recv_from_worker: recv", recv), sender);
}

void RecvFromWorker0(ffi::TensorView recv) {
  Rank& rank = RequireRank();
  if (rank.id() == 0) Fail(kind::kValue, "recv_from_worker0: rank 0 is the caller itself");
  Receive(rank, ViewBuffer("recv_from_worker0: recv", recv), 0);
}

void SendToNextGroup(ffi::TensorView send) {
  Rank& rank = RequireRank();
  const int receiver = rank.id() + rank.group_size();
  if (receiver >= rank.num_ranks()) {
    Fail(kind::kValue, "send_to_next_group: rank ", rank.id(), " is in the last group");
  }
  Send(rank, ViewBuffer("send_to_next_group: send", send), receiver);
}

void RecvFromPrevGroup(ffi::TensorView recv) {
  Rank& rank = RequireRank();
  const int sender = rank.id() - rank.group_size();
  if (sender < 0) {
    Fail(kind::kValue, "recv_from_prev_group: rank ", rank.id(), " is in the first group");
  }
  Receive(rank, ViewBuffer("recv_from_prev_group: recv", recv), sender);
}

void SyncWorker() { RequireRank(); }

void RequireTwoPairs(const Rank& rank) {
  if (rank.num_ranks() != 4 || rank.group_size() != 2) {
    Fail(kind::kValue, "this exercise wants 4 workers in 2 groups");
  }
}

void ExerciseGroups(ffi::TensorView buffer) {
  RequireTwoPairs(RequireRank());
  return RequireRank().id() < 2 ? SendToNextGroup(buffer) : RecvFromPrevGroup(buffer);
}

void ExerciseSend(ffi::TensorView buffer) {
  RequireTwoPairs(RequireRank());
  if (RequireRank().id() == 2) SendToWorker(buffer, 0);
  if (RequireRank().id() == 0) RecvFromWorker(buffer, 2);
}

ffi::String NativeInfo() {
  ffi::Array<ffi::Any> sets;
  const std::string now = InstructionSet();
  for (const char* name : {"avx512bf16", "avx512", "avx2", "portable"}) {
    if (UseInstructionSet(name)) sets.push_back(ffi::String(name));
  }
  UseInstructionSet(now);
  const int file = memfd_create("tvm_ipc probe", MFD_CLOEXEC);
  const int process = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
  ffi::Map<ffi::String, ffi::Any> json;
  json.Set("instruction_sets", sets);
  json.Set("instruction_set", ffi::String(now));
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

ffi::String CompiledCCL() { return "shm"; }

#define TVM_IPC_CUDA_IPC "runtime.disco.cuda_ipc."
#define TVM_IPC_SHM "runtime.disco.shm."

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def("runtime.disco.compiled_ccl", CompiledCCL)
      .def(TVM_IPC_CUDA_IPC "alloc_storage", Throwing<AllocStorage>::Call)
      .def(TVM_IPC_CUDA_IPC "custom_allreduce", Throwing<CustomAllReduce>::Call)
      .def(TVM_IPC_CUDA_IPC "cuda_ipc_memory_allocator_clear", Throwing<ClearArena>::Call)
      .def(TVM_IPC_SHM "init_ccl_per_worker", Throwing<worker::InitCCLPerWorker>::Call)
      .def(TVM_IPC_SHM "allreduce", Throwing<PlainAllReduce>::Call)
      .def(TVM_IPC_SHM "allgather", Throwing<PlainAllGather>::Call)
      .def(TVM_IPC_SHM "broadcast_from_worker0", Throwing<BroadcastFromWorker0>::Call)
      .def(TVM_IPC_SHM "scatter_from_worker0", Throwing<ScatterFromWorker0>::Call)
      .def(TVM_IPC_SHM "gather_to_worker0", Throwing<GatherToWorker0>::Call)
      .def(TVM_IPC_SHM "recv_from_worker0", Throwing<RecvFromWorker0>::Call)
      .def(TVM_IPC_SHM "send_to_next_group", Throwing<SendToNextGroup>::Call)
      .def(TVM_IPC_SHM "recv_from_prev_group", Throwing<RecvFromPrevGroup>::Call)
      .def(TVM_IPC_SHM "send_to_worker", Throwing<SendToWorker>::Call)
      .def(TVM_IPC_SHM "recv_from_worker", Throwing<RecvFromWorker>::Call)
      .def(TVM_IPC_SHM "sync_worker", Throwing<SyncWorker>::Call)
      .def(TVM_IPC_SHM "test_send_to_next_group_recv_from_prev_group",
           Throwing<ExerciseGroups>::Call)
      .def(TVM_IPC_SHM "test_worker2_sends_to_worker0", Throwing<ExerciseSend>::Call)
      .def("tvm_ipc.allreduce", Throwing<AllReduceWithAll>::Call)
      .def("tvm_ipc.team", Throwing<worker::TeamOfRanks>::Call)
      .def("tvm_ipc.alloc_tensor", Throwing<AllocTensor>::Call)
      .def("tvm_ipc.require_bounds", Throwing<RequireBounds>::Call)
      .def("tvm_ipc.copy", Throwing<CopyTensor>::Call)
      .def_packed("tvm_ipc.blas.matmul", ThrowingPacked<BlasMatmul>::Call)
      .def("tvm_ipc.blas.info", Throwing<BlasInfo>::Call)
      .def("tvm_ipc.blas.use_kernels", Throwing<UseBlasKernels>::Call)
      .def("tvm_ipc.arena_stats", Throwing<ArenaStatistics>::Call)
      .def("tvm_ipc.arena_offset", Throwing<ArenaOffset>::Call)
      .def("tvm_ipc.native_info", Throwing<NativeInfo>::Call)
      .def("tvm_ipc.numbers", Throwing<Numbers>::Call)
      .def("tvm_ipc.configure", Throwing<controller::Configure>::Call)
      .def("tvm_ipc.session.open", Throwing<controller::Open>::Call)
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
      .def("tvm_ipc.worker.share_rank", Throwing<worker::ShareRank>::Call)
      .def("tvm_ipc.worker.set_threads", Throwing<worker::SetThreads>::Call)
      .def("tvm_ipc.worker.get_function", Throwing<worker::GetFunction>::Call)
      .def("tvm_ipc.worker.call_if_present", Throwing<worker::CallIfPresent>::Call)
      .def("tvm_ipc.require_workers", Throwing<worker::RequireWorkers>::Call);
}

}  // namespace
}  // namespace tvm_ipc
