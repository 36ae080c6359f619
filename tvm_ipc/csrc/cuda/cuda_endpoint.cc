/* SPDX-License-Identifier: Apache-2.0 */
/*! \file cuda_endpoint.cc */
#include "cuda/cuda_endpoint.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>

#include "core/check_collective_arguments.h"
#include "core/current_stream_hooks.h"
#include "core/handle_allgather_via_session_server.h"
#include "core/teams.h"
#include "driver/comm_stream_async_queue.h"

namespace tvm_ipc::cuda {

namespace {

constexpr size_t kPageOfHost = 4096;

Identity IdentityOf(const Device& device) {
  Identity identity;
  identity.pid = getpid();
  identity.ordinal = device.ordinal();
  device.facts().uuid.copy(identity.uuid, sizeof(identity.uuid) - 1);
  return identity;
}

std::vector<Identity> IdentitiesOf(Rank& rank, const Identity& mine) {
  std::vector<Identity> all;
  for (const Exported& exposed :
       AllGatherHandles(rank, "the devices of the cuda backend", {AsBytes(mine), {}})) {
    Identity theirs;
    memcpy(&theirs, exposed.bytes.data(), std::min(exposed.bytes.size(), sizeof(theirs)));
    all.push_back(theirs);
  }
  return all;
}

/*! \brief Return the default arena size of a rank, which shares the device's memory with other
 *         ranks and programs. */
size_t DefaultArenaOn(const Device& device, int ranks) {
  constexpr size_t kMost = size_t{1} << 30;
  return std::min(kMost, device.FreeMemory() / 8 / static_cast<size_t>(ranks));
}

std::shared_ptr<kernels::ErrorRecord> MakeRecords(const std::shared_ptr<Device>& device) {
  const Here here(*device);
  void* data = nullptr;
  const size_t bytes = (kTeamSlots + 1) * sizeof(kernels::ErrorRecord);
  device->driver().cuMemHostAlloc("memory for what kernels report", &data, bytes, kPortableMapped);
  memset(data, 0, bytes);
  return {static_cast<kernels::ErrorRecord*>(data), [device](kernels::ErrorRecord* records) {
            Quietly(*device, [&](const Driver& driver) { driver.cuMemFreeHost.Try(records); });
          }};
}

}  // namespace

CudaEndpoint::CudaEndpoint(Rank& rank)
    : rank_(rank),
      device_(Device::Open(rank.options().device)),
      kernels_(Kernels::Load(device_)),
      driver_(device_->driver()),
      compute_streams_(device_),
      sent_(rank.num_ranks()),
      received_(rank.num_ranks()),
      generation_(rank.control().generation.load(std::memory_order_acquire)) {
  if (rank.num_ranks() > kernels::kMaxMembers) {
    Fail(kind::kValue, "the backend cuda connects ", kernels::kMaxMembers, " workers at most, not ",
         rank.num_ranks(), "; the backend nccl has no such limit");
  }
  const std::vector<Identity> all = IdentitiesOf(rank, IdentityOf(*device_));
  const Identity& me = all[static_cast<size_t>(rank.id())];
  int ranks_on_device = 0;
  for (const Identity& theirs : all) {
    if (!me.Shares(theirs)) continue;
    ++ranks_on_device;
    if (me.pid == theirs.pid) ++ranks_here_;
  }
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      meets_ = meets_ || all[i].pid == all[j].pid;
      apart_ = apart_ && !all[i].Shares(all[j]);
    }
  }
  limits_ = kernels_->LimitsFor(ranks_on_device);
  const size_t asked = rank.control().arena_bytes;
  const size_t arena = asked != 0 ? asked : DefaultArenaOn(*device_, ranks_on_device);
  stream_ = std::make_unique<OwnStream>(device_);
  copy_stream_ = std::make_unique<OwnStream>(device_);
  async_stream_ = std::make_shared<OwnStream>(device_);
  records_ = MakeRecords(device_);
  auto* const word = reinterpret_cast<uint8_t*>(&rank.control().abort);
  auto* const page =
      reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(word) / kPageOfHost * kPageOfHost);
  control_page_ = Pinned::Register(device_, page, kPageOfHost);
  abort_ = Pointer<const uint32_t>(Pinned::On(*device_, page) + static_cast<size_t>(word - page));
  regions_ = Regions::Make(rank, device_, kernels_, arena, &limits_);
  if (ranks_here_ > 1) {
    // The ranks would share the default stream. There, the kernel of one rank would be queued ahead
    // of the kernel of another, for which it waits.
    program_stream_ = std::make_unique<OwnStream>(device_);
    ProgramStreams().use(kDeviceType, device_->ordinal(), program_stream_->get());
  }
}

CudaEndpoint::~CudaEndpoint() {
  if (device_->in_forked_child()) return;
  try {
    // The thread may be exiting, so the record of its current stream may already be destroyed.
    Drain(nullptr);
  } catch (const Error&) {
    // The error was reported before, or nobody is left to receive it.
  }
}

bool CudaEndpoint::Outlasts(Stream stream) const {
  return IsDefaultStream(stream) || stream == async_stream_->get() ||
         (program_stream_ != nullptr && stream == program_stream_->get());
}

void CudaEndpoint::WaitForStream(Stream waiting, Stream other) const {
  const OwnEvent event(device_);  // its destruction is deferred until the event has completed
  event.Record(other);
  event.Await(waiting);
}

Enqueuing::Enqueuing(const CudaEndpoint& endpoint, Order& order)
    : order_(order),
      stream_(ProgramStream(*endpoint.device_)),
      capturing_(IsCapturing(*endpoint.device_, stream_)) {
  if (capturing_) return;
  if (const Status failed = std::exchange(order.failed, kSuccess); failed != kSuccess) {
    FailCall("cuEventRecord", "to order streams", failed);
  }
  // Always wait for `end`: a new stream may have the handle of one that was destroyed.
  if (order.ended) order.end->Await(stream_);
  if (order.stream.has_value() && *order.stream != stream_) {
    endpoint.WaitForStream(stream_, *order.stream);
  }
  // TVM copies on the default stream, and our streams do not wait for that one implicitly.
  if (endpoint.program_stream_ != nullptr && stream_ != nullptr) {
    endpoint.WaitForStream(stream_, nullptr);
  }
  order.stream.reset();
  order.ended = false;
  if (endpoint.Outlasts(stream_)) {
    order.stream = stream_;
  } else if (order.end == nullptr) {
    order.end = std::make_unique<OwnEvent>(endpoint.device_);
  }
}

Enqueuing::~Enqueuing() {
  if (capturing_ || order_.stream.has_value()) return;
  order_.failed = order_.end->TryRecord(stream_);
  order_.ended = order_.failed == kSuccess;
}

Member& CudaEndpoint::MemberOf(TeamBarrier& barrier) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = members_.find(&barrier);
  if (known != members_.end()) return known->second;
  Member member;
  member.barrier = &barrier;
  member.size = barrier.size();
  member.place = barrier.index();
  member.where = barrier.Where();
  for (int i = 0; i < barrier.size(); ++i) {
    if (barrier.slot_index(i) >= kTeamSlots) {
      Fail(kind::kRuntime, "rank ", barrier.rank(i), " is in more than ", kTeamSlots - kFirstTeam,
           " teams that were made; the backend cuda has no more seats, and teams live as long as"
           " the session");
    }
    member.ranks.push_back(barrier.rank(i));
    member.args.team_slot[i] = regions_->team_slot(barrier.rank(i), barrier.slot_index(i));
    member.args.region[i] = Pointer<const uint8_t>(regions_->base(barrier.rank(i)));
  }
  member.args.size = member.size;
  member.args.place = member.place;
  const TeamRecord* const made = FindTeam(rank_.control(), barrier.team());
  const bool is_async = made != nullptr && made->copy >= kAsyncTeamCopies;
  member.limits = is_async ? kernels::LimitsOfAsync(limits_) : limits_;
  const int team_slot = barrier.slot_index(member.place);
  member.record = records_.get() + team_slot;
  member.args.guard = GuardOf(&member.args.team_slot[member.place]->failed, member.record);
  return members_.emplace(&barrier, std::move(member)).first->second;
}

kernels::Guard CudaEndpoint::GuardOf(uint32_t* failed, kernels::ErrorRecord* record) const {
  const auto timeout = static_cast<uint64_t>(rank_.options().deadline.count());
  return {timeout, abort_, failed, Pointer<kernels::ErrorRecord>(Pinned::On(*device_, record))};
}

void CudaEndpoint::Launch(const char* what, Kernel kernel, const kernels::Launch& grid,
                          Stream stream, void* arguments) const {
  void* all[] = {arguments};
  driver_.cuLaunchKernel(what, kernel, grid.blocks, 1, 1, grid.threads, 1, 1, 0, stream, all,
                         nullptr);
}

void CudaEndpoint::CopyOnStream(void* target, const void* source, size_t bytes,
                                Stream stream) const {
  if (bytes == 0 || target == source) return;
  driver_.cuMemcpyAsync("to copy on a device", AddressOf(target), AddressOf(source), bytes, stream);
}

void* CudaEndpoint::Grow(GrowOnlyBuffer& memory, size_t bytes) {
  if (bytes > memory.bytes) {
    const std::shared_ptr<Heap>& room = regions_->room();
    const size_t size = std::max(bytes, std::min(2 * memory.bytes, bytes + bytes / 2));
    memory.data = room->Allocate(size);
    memory.bytes = size;
  }
  return memory.data;
}

void CudaEndpoint::Copy(const Buffer& source, const Buffer& target) {
  const Here here(*device_);
  const size_t bytes = std::min(source.bytes(), target.bytes());
  CopyOnStream(target.data, source.data, bytes, ProgramStream(*device_));
}

void CudaEndpoint::WriteNumber(int64_t number, const Buffer& recv) {
  const Here here(*device_);
  Stream const stream = ProgramStream(*device_);
  const auto bits = static_cast<uint64_t>(number);
  const Address low = AddressOf(recv.data);
  const char* const what = "to write a number";
  driver_.cuMemsetD32Async(what, low, static_cast<unsigned>(bits), 1, stream);
  driver_.cuMemsetD32Async(what, low + 4, static_cast<unsigned>(bits >> 32), 1, stream);
}

void CudaEndpoint::Clear(const Buffer& recv) {
  if (recv.bytes() == 0) return;
  const Here here(*device_);
  driver_.cuMemsetD8Async("to clear a result", AddressOf(recv.data), 0, recv.bytes(),
                          ProgramStream(*device_));
}

void CudaEndpoint::Drain(const Stream* current) {
  const Here here(*device_);
  std::vector<Stream> streams = {copy_stream_->get()};
  if (program_stream_ != nullptr) streams.push_back(program_stream_->get());
  if (current != nullptr) streams.push_back(*current);
  std::vector<const OwnEvent*> ends;
  auto add = [&](const Order& order) {
    if (order.ended) ends.push_back(order.end.get());
    if (!order.stream.has_value()) return;
    if (std::find(streams.begin(), streams.end(), *order.stream) != streams.end()) return;
    streams.push_back(*order.stream);
  };
  if (std::lock_guard<std::mutex> lock(mutex_); true) {
    for (const auto& [barrier, member] : members_) add(member.order);
    for (const Order& order : sent_) add(order);
    for (const Order& order : received_) add(order);
  }
  const std::string what = Text("what was started on ", device_->name());
  Status failed = kSuccess;
  const char* call = nullptr;
  auto take = [&](const char* name, Status status) {
    if (failed == kSuccess && status != kSuccess) std::tie(call, failed) = std::tie(name, status);
  };
  for (Stream stream : streams) {
    take("cuStreamSynchronize", driver_.cuStreamSynchronize.Try(stream));
  }
  for (const OwnEvent* end : ends) take("cuEventSynchronize", end->TryWait());
  if (failed != kSuccess) FailCall(call, what.c_str(), failed);
}

void CudaEndpoint::Settle() {
  if (rank_.in_forked_child()) return;
  compute_streams_.AwaitAll();
  Stream const current = ProgramStream(*device_);
  Drain(&current);
  CheckReports();
}

void CudaEndpoint::CheckReports() {
  // Reports from before a recovery have already been thrown; the next operation clears them.
  if (generation_.load() == rank_.control().generation.load()) CheckRecords();
}

void CudaEndpoint::Synchronise() { Settle(); }

void CudaEndpoint::FinishCommand() {
  if (program_stream_ != nullptr) Settle();
}

void CudaEndpoint::Follow(uint32_t generation) {
  if (generation_.load(std::memory_order_acquire) == generation) return;
  std::lock_guard<std::mutex> lock(recovery_mutex_);
  if (generation_.load(std::memory_order_relaxed) == generation) return;
  StartAgain();
  generation_.store(generation, std::memory_order_release);
}

void CudaEndpoint::StartAgain() {
  Stream const current = ProgramStream(*device_);
  Drain(&current);
  // From here on, no kernel of any rank can still write into team slots.
  AllGatherHandles(rank_, "the end of what went before an error", {});
  stream_->Zero(regions_->base(rank_.id()), kArenaStart);
  memset(static_cast<void*>(records_.get()), 0, (kTeamSlots + 1) * sizeof(kernels::ErrorRecord));
  if (std::lock_guard<std::mutex> lock(mutex_); true) {
    for (auto& [barrier, member] : members_) member.compared = false;
  }
  AllGatherHandles(rank_, "a new start after an error", {});
}

std::unique_ptr<AsyncQueue> CudaEndpoint::MakeAsyncQueue() {
  return std::make_unique<StreamAsyncQueue>(rank_, device_, async_stream_);
}

Operation::Operation(CudaEndpoint& endpoint, TeamId team)
    : guard([&] {
        Rank& rank = endpoint.rank_;
        endpoint.Follow(rank.control().generation.load(std::memory_order_acquire));
        return rank.Begin(team);
      }()),
      member(endpoint.MemberOf(guard.barrier)),
      stream(nullptr),
      endpoint_(endpoint),
      here_(*endpoint.device_) {
  endpoint.CheckRecord(*member.record, &member);
  enqueuing_.emplace(endpoint, member.order);
  stream = enqueuing_->stream();
  capturing = enqueuing_->capturing();
}

void Operation::LaunchTogether(const char* what, Kernel kernel, const kernels::Launch& grid,
                               const kernels::Header& header, void* arguments) const {
  if (endpoint_.meets_ && member.size > 1) {
    if (capturing) {
      endpoint_.RequireReplays(what);
      return Launch(what, kernel, grid, arguments);
    }
    guard.barrier.Enter(DescriptorOf(header, &member));
  }
  LaunchMet(what, kernel, grid, arguments);
}

void Operation::LaunchMet(const char* what, Kernel kernel, const kernels::Launch& grid,
                          void* arguments) const {
  const Launching launching(endpoint_.meets_ && member.size > 1);
  Launch(what, kernel, grid, arguments);
  if (!endpoint_.meets_ || member.size == 1) return;
  Descriptor launched;
  launched.op = "launch";
  guard.barrier.Enter(launched);
}

void CudaEndpoint::RequireReplays(const char* operation) const {
  const int queues = rank_.options().queues_for_graphs, streams = kStreamsOfRank * ranks_here_;
  if (queues > 0 && (ranks_here_ == 1 || streams <= queues)) return;
  if (queues > 0) {
    Fail(kind::kRuntime, operation, ": a CUDA graph is being captured, and ", ranks_here_,
         " workers of this process share a GPU. They need ", streams,
         " hardware queues, but CUDA has ", queues,
         ", so the graph could deadlock. Set CUDA_DEVICE_MAX_CONNECTIONS=32 before the program uses"
         " CUDA, with at most 8 workers on a GPU, or let workers be processes");
  }
  Fail(kind::kRuntime, operation,
       ": a CUDA graph is being captured, and workers are threads of one process. Replays are not"
       " synchronized on the host, so a call of one worker that allocates or frees memory, or loads"
       " code, would wait for kernels that wait for that worker. Let workers be processes, or leave"
       " collectives out of graphs. Set TVM_IPC_CUDA_GRAPHS_OF_THREADS=1 only if no worker makes"
       " such a call between the first replay and the end of the last one");
}

Operation::Input Operation::PrepareInput(const void* data, size_t bytes, uint8_t flags) {
  if (bytes == 0) return {kArenaStart, true};
  const int64_t offset = endpoint_.regions_->OffsetOf(data, bytes);
  if (offset >= 0) return {static_cast<uint64_t>(offset), (flags & kNoExitBarrier) != 0};
  void* const stage = endpoint_.Grow(member.stage, bytes);
  Copy(stage, data, bytes);
  // The next operation may copy its input there before peers learn that it has started.
  return {static_cast<uint64_t>(endpoint_.regions_->OffsetOf(stage, bytes)), false};
}

void* Operation::Scratch(size_t bytes, uint64_t* offset) {
  void* const scratch = endpoint_.Grow(member.scratch, std::max<size_t>(bytes, 1));
  *offset = static_cast<uint64_t>(endpoint_.regions_->OffsetOf(scratch, bytes));
  return scratch;
}

kernels::Header HeaderOf(kernels::Operation operation, ElementType type, uint64_t count) {
  kernels::Header header;
  header.operation = operation;
  header.type = static_cast<uint32_t>(type.code) | static_cast<uint32_t>(type.bits) << 8 |
                static_cast<uint32_t>(type.lanes) << 16;
  header.count = count;
  return header;
}

kernels::Header HeaderOf(const Call& call) {
  static constexpr kernels::Operation kOperations[] = {
#define TVM_IPC_OPERATION(Name, text, relation, mpi, cuda, ...) \
  kernels::Operation{TVM_IPC_IF_##cuda(kernels::k##Name)},
      TVM_IPC_COLLECTIVES(TVM_IPC_OPERATION)
#undef TVM_IPC_OPERATION
  };
  const Descriptor mine = DescriptorOf(call, call.root);
  kernels::Header header =
      HeaderOf(kOperations[static_cast<size_t>(call.collective)], mine.type, mine.count);
  header.mode = kernels::Mode(static_cast<uint32_t>(mine.kind),
                              static_cast<uint32_t>(mine.strategy + 1), mine.flags);
  header.root = mine.root;
  header.parts = mine.layout_hash;
  return header;
}

void CudaEndpoint::Run(const Call& call) {
  using Run = void (CudaEndpoint::*)(Operation& operation, const Call& call);
  static constexpr Run kKernels[] = {
#define TVM_IPC_KERNEL(Name, text, relation, mpi, cuda, ...) \
  Run{TVM_IPC_IF_##cuda(&CudaEndpoint::Name)},
      TVM_IPC_COLLECTIVES(TVM_IPC_KERNEL)
#undef TVM_IPC_KERNEL
  };
  Check(rank_, call);
  Operation operation(*this, call.team);
  (this->*KernelOf(kKernels, call))(operation, call);
}

}  // namespace tvm_ipc::cuda
