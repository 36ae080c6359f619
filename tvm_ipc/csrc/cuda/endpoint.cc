/* SPDX-License-Identifier: Apache-2.0 */
/*! \file endpoint.cc */
#include "cuda/endpoint.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "core/exchange.h"
#include "core/streams.h"
#include "core/teams.h"
#include "driver/works.h"

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
  for (const Exported& shown :
       ExchangeWithAll(rank, "the devices of the cuda backend", {AsBytes(mine), {}})) {
    Identity theirs;
    memcpy(&theirs, shown.bytes.data(), std::min(shown.bytes.size(), sizeof(theirs)));
    all.push_back(theirs);
  }
  return all;
}

/*! \brief Of a rank where nobody says: it shares the device's memory with programs and ranks. */
size_t DefaultArenaOn(const Device& device, int ranks) {
  constexpr size_t kMost = size_t{1} << 30;
  return std::min(kMost, device.FreeMemory() / 8 / static_cast<size_t>(ranks));
}

/*! \brief A stream that its owner has ended; who did so has waited for it. */
bool IsGone(Status status) {
  constexpr int kInvalidHandle = 400;
  constexpr int kContextIsDestroyed = 709;
  return static_cast<int>(status) == kInvalidHandle ||
         static_cast<int>(status) == kContextIsDestroyed;
}

bool LetsThreadsCapture() {
  constexpr const char* kName = "TVM_IPC_CUDA_GRAPHS_OF_THREADS";
  const char* const given = getenv(kName);
  const std::string value = given == nullptr ? "" : given;
  if (!value.empty() && value != "0" && value != "1") {
    Fail(kind::kValue, kName, " must be 0 or 1, not '", value, "'");
  }
  return value == "1";
}

std::shared_ptr<kernels::ErrorRecord> MakeRecords(const std::shared_ptr<Device>& device) {
  const Here here(*device);
  void* data = nullptr;
  const size_t bytes = (kSeats + 1) * sizeof(kernels::ErrorRecord);
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
  int ranks_here = 0;
  for (const Identity& theirs : all) {
    if (!me.Shares(theirs)) continue;
    ++ranks_on_device;
    if (me.pid == theirs.pid) ++ranks_here;
  }
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      meets_ = meets_ || all[i].pid == all[j].pid;
      apart_ = apart_ && !all[i].Shares(all[j]);
    }
  }
  captures_ = LetsThreadsCapture();
  limits_ = kernels_->LimitsFor(ranks_on_device);
  const size_t asked = rank.control().arena_bytes;
  const size_t arena = asked != 0 ? asked : DefaultArenaOn(*device_, ranks_on_device);
  stream_ = std::make_unique<OwnStream>(device_);
  copy_stream_ = std::make_unique<OwnStream>(device_);
  records_ = MakeRecords(device_);
  auto* const word = reinterpret_cast<uint8_t*>(&rank.control().abort);
  auto* const page =
      reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(word) / kPageOfHost * kPageOfHost);
  control_page_ = Pinned::Register(device_, page, kPageOfHost);
  abort_ = Pointer<const uint32_t>(Pinned::On(*device_, page) + static_cast<size_t>(word - page));
  regions_ = Regions::Make(rank, device_, kernels_, arena, &limits_);
  if (ranks_here > 1) {
    // On the default stream, which they would share, the kernel of one would stand before that of
    // another, for which it waits.
    program_stream_ = std::make_unique<OwnStream>(device_);
    ProgramStreams().use(kDeviceType, device_->ordinal(), program_stream_->get());
  }
}

CudaEndpoint::~CudaEndpoint() {
  if (device_->forked()) return;
  try {
    // The thread may be ending, and what knows its current stream may be gone.
    Drain(nullptr);
  } catch (const Error&) {
    // It was told before, or nobody wants to know any more.
  }
}

Stream CudaEndpoint::Enter(Order& order, bool* capturing) {
  Stream const stream = ProgramStream(*device_);
  *capturing = IsCapturing(*device_, stream);
  if (*capturing) return stream;
  auto wait_for = [&](Stream other) {
    Event event = nullptr;
    driver_.cuEventCreate("to order streams", &event, kWithoutTiming);
    Status status = driver_.cuEventRecord.Try(event, other);
    if (status == kSuccess) status = driver_.cuStreamWaitEvent.Try(stream, event, 0);
    driver_.cuEventDestroy_v2.Try(event);  // once it has come
    if (status != kSuccess && !IsGone(status))
      FailCall("cuStreamWaitEvent", "to order streams", status);
  };
  if (order.last.has_value() && *order.last != stream) wait_for(*order.last);
  // TVM copies on the default stream, which others of our streams do not wait for by themselves.
  if (program_stream_ != nullptr && stream != nullptr) wait_for(nullptr);
  order.last = stream;
  return stream;
}

Member& CudaEndpoint::MemberOf(Meeting& meeting) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = members_.find(&meeting);
  if (known != members_.end()) return known->second;
  Member member;
  member.meeting = &meeting;
  member.size = meeting.size();
  member.place = meeting.index();
  member.where = meeting.Where();
  for (int i = 0; i < meeting.size(); ++i) {
    if (meeting.place(i) >= kSeats) {
      Fail(kind::kRuntime, "rank ", meeting.rank(i), " is in more than ", kSeats - kFirstTeam,
           " teams that were made; the backend cuda has no more seats, and teams live as long as"
           " the session");
    }
    member.ranks.push_back(meeting.rank(i));
    member.args.seat[i] = regions_->seat(meeting.rank(i), meeting.place(i));
    member.args.region[i] = Pointer<const uint8_t>(regions_->base(meeting.rank(i)));
  }
  member.args.size = member.size;
  member.args.place = member.place;
  const TeamRecord* const made = FindTeam(rank_.control(), meeting.team());
  const bool of_works = made != nullptr && made->copy >= kCopiesOfWorks;
  member.limits = of_works ? kernels::LimitsOfWorks(limits_) : limits_;
  const int seat = meeting.place(member.place);
  member.record = records_.get() + seat;
  member.args.guard = GuardOf(&member.args.seat[member.place]->failed, member.record);
  return members_.emplace(&meeting, std::move(member)).first->second;
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

void* CudaEndpoint::Grow(Growing& memory, size_t bytes) {
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

void CudaEndpoint::Drain(const Stream* current) {
  const Here here(*device_);
  std::vector<Stream> streams = {copy_stream_->get()};
  if (program_stream_ != nullptr) streams.push_back(program_stream_->get());
  if (current != nullptr) streams.push_back(*current);
  auto add = [&](const Order& order) {
    if (!order.last.has_value()) return;
    if (std::find(streams.begin(), streams.end(), *order.last) != streams.end()) return;
    streams.push_back(*order.last);
  };
  if (std::lock_guard<std::mutex> lock(mutex_); true) {
    for (const auto& [meeting, member] : members_) add(member.order);
    for (const Order& order : sent_) add(order);
    for (const Order& order : received_) add(order);
  }
  Status failed = kSuccess;
  for (Stream stream : streams) {
    const Status status = driver_.cuStreamSynchronize.Try(stream);
    if (failed == kSuccess && !IsGone(status)) failed = status;
  }
  if (failed != kSuccess) {
    FailCall("cuStreamSynchronize", Text("what was started on ", device_->name()).c_str(), failed);
  }
}

void CudaEndpoint::Settle() {
  if (rank_.forked()) return;
  Stream const current = ProgramStream(*device_);
  Drain(&current);
  CheckReports();
}

void CudaEndpoint::CheckReports() {
  // What was reported before a recovery has been told; the next operation clears it.
  if (generation_.load() == rank_.control().generation.load()) CheckRecords();
}

void CudaEndpoint::Synchronise() { Settle(); }

void CudaEndpoint::Rest() {
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
  // From here on no kernel of any rank is on its way to write into seats.
  ExchangeWithAll(rank_, "the end of what went before an error", {});
  stream_->Zero(regions_->base(rank_.id()), kArenaStart);
  memset(static_cast<void*>(records_.get()), 0, (kSeats + 1) * sizeof(kernels::ErrorRecord));
  if (std::lock_guard<std::mutex> lock(mutex_); true) {
    for (auto& [meeting, member] : members_) member.compared = false;
  }
  ExchangeWithAll(rank_, "a new start after an error", {});
}

std::unique_ptr<Works> CudaEndpoint::MakeWorks() {
  return std::make_unique<WorksOnStream>(rank_, device_);
}

Operation::Operation(CudaEndpoint& endpoint, TeamId team)
    : turn([&] {
        Rank& rank = endpoint.rank_;
        endpoint.Follow(rank.control().generation.load(std::memory_order_acquire));
        return rank.Begin(team);
      }()),
      member(endpoint.MemberOf(turn.meeting)),
      stream(nullptr),
      endpoint_(endpoint),
      here_(*endpoint.device_) {
  endpoint.CheckRecord(*member.record, &member);
  stream = endpoint.Enter(member.order, &capturing);
}

void Operation::LaunchTogether(const char* what, Kernel kernel, const kernels::Launch& grid,
                               const kernels::Header& header, void* arguments) const {
  if (endpoint_.meets_ && member.size > 1) {
    if (capturing) {
      endpoint_.RequireReplays(what);
      return Launch(what, kernel, grid, arguments);
    }
    turn.meeting.Enter(DescriptorOf(header, &member));
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
  turn.meeting.Enter(launched);
}

void CudaEndpoint::RequireReplays(const char* operation) const {
  if (captures_) return;
  Fail(kind::kRuntime, operation,
       ": a CUDA graph is being captured, and workers are threads of one process: replays do not"
       " meet on the host, and a call of one worker that allocates or frees memory would wait for"
       " kernels that wait for that worker. Let workers be processes, or leave collectives out of"
       " graphs; TVM_IPC_CUDA_GRAPHS_OF_THREADS=1 lets those capture them who make no such call"
       " from the first replay to the end of the last one");
}

void Operation::RequireRoot(const char* operation, int root) const {
  if (root >= 0 && root < size()) return;
  Fail(kind::kValue, operation, ": there is no root ", root, " in a team of ", size(),
       "; it is a place in the team, from 0 on");
}

Operation::Input Operation::Place(const void* data, size_t bytes, uint8_t flags) {
  if (bytes == 0) return {kArenaStart, true};
  const int64_t offset = endpoint_.regions_->OffsetOf(data, bytes);
  if (offset >= 0) return {static_cast<uint64_t>(offset), (flags & kNoExitBarrier) != 0};
  void* const stage = endpoint_.Grow(member.stage, bytes);
  Copy(stage, data, bytes);
  // The next operation's input may be copied there before anybody hears of that.
  return {static_cast<uint64_t>(endpoint_.regions_->OffsetOf(stage, bytes)), false};
}

void* Operation::Scratch(size_t bytes, uint64_t* offset) {
  void* const scratch = endpoint_.Grow(member.scratch, std::max<size_t>(bytes, 1));
  *offset = static_cast<uint64_t>(endpoint_.regions_->OffsetOf(scratch, bytes));
  return scratch;
}

kernels::Header HeaderOf(kernels::Operation operation, ElementType type, uint64_t count,
                         uint8_t flags) {
  kernels::Header header;
  header.operation = operation;
  header.mode = kernels::Mode(0, 0, flags);
  header.type = static_cast<uint32_t>(type.code) | static_cast<uint32_t>(type.bits) << 8 |
                static_cast<uint32_t>(type.lanes) << 16;
  header.count = count;
  return header;
}

}  // namespace tvm_ipc::cuda
