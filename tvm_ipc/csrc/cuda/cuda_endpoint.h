/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file cuda_endpoint.h
 * \brief The endpoint of a rank with a CUDA device. It checks operations, launches kernels on the
 *        program's stream, and throws the errors that the kernels report.
 *
 * Only the operations on exposed buffers wait for a peer, because they also synchronize on the
 * host. All other operations return once they are enqueued on the stream. (For ranks that are
 * threads of one process, see CudaEndpoint::meets_.) An error on the device is thrown by the next
 * operation of the team, or by Synchronise or Settle.
 *
 * The operations of a team run one after the other. If the calling thread uses a different stream
 * than last time, that stream first waits for the previous operation. Programs may destroy a stream
 * while operations are on it, because only their events are used later. A stream that is being
 * captured for a CUDA graph does not wait: the program defines the order of replays.
 */
#ifndef TVM_IPC_CUDA_CUDA_ENDPOINT_H_
#define TVM_IPC_CUDA_CUDA_ENDPOINT_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/communication_backend.h"
#include "core/rank_runtime_state.h"
#include "cuda/host_registration.h"
#include "cuda/map_peer_regions.h"
#include "driver/compute_streams.h"

namespace tvm_ipc::cuda {

/*! \brief A buffer in the rank's own region that grows and is never freed, because captured graphs
 *         keep using the memory they were captured with. */
struct GrowOnlyBuffer {
  void* data = nullptr;
  size_t bytes = 0;
};

/*! \brief The last operation of a sequence that runs in order, on any streams. */
struct Order {
  /*! \brief The operation's stream, if that stream outlasts the endpoint. */
  std::optional<Stream> stream;
  /*! \brief The event after the operation, if it is on a stream of the program. */
  std::unique_ptr<OwnEvent> end;
  /*! \brief Whether `end` was recorded for the last operation. */
  bool ended = false;
  /*! \brief The error of recording `end`, if recording failed. */
  Status failed = kSuccess;
};

/*! \brief The state of this rank in a team, created by the team's first operation. */
struct Member {
  TeamBarrier* barrier = nullptr;
  int size = 0;
  int place = 0;
  /*! \brief The team as error messages print it: "in team 3 (ranks 0, 2)". */
  std::string where;
  /*! \brief The ranks of the members, by index in the team. */
  std::vector<int> ranks;
  kernels::TeamArgs args{};
  kernels::ErrorRecord* record = nullptr;
  /*! \brief The launch limits of its kernels. Those of asynchronous operations share the device
   *         with the program's. */
  kernels::Limits limits{1, 1};
  /*! \brief Whether the members have compared their operations since a kernel found a mismatch. */
  bool compared = false;
  Order order;
  /*! \brief The staging buffer for inputs outside the region, which peers cannot read directly. */
  GrowOnlyBuffer stage;
  /*! \brief The buffer that holds reduced slices until peers have read them. */
  GrowOnlyBuffer scratch;
  /*! \brief The buffer that holds a sum until the residual is added and the rows are normalised. */
  GrowOnlyBuffer sum;
};

class CudaEndpoint;
class Operation;
struct MovePlan;

/*! \brief A scope in which an operation is enqueued on the calling thread's stream, after the
 *         previous one of the same order. */
class Enqueuing {
 public:
  Enqueuing(const CudaEndpoint& endpoint, Order& order);
  /*! \brief Record the end of the operation, for which the next one waits. */
  ~Enqueuing();
  Enqueuing(const Enqueuing&) = delete;
  Enqueuing& operator=(const Enqueuing&) = delete;

  Stream stream() const { return stream_; }
  bool capturing() const { return capturing_; }

 private:
  Order& order_;
  Stream stream_;
  bool capturing_;
};

class CudaEndpoint final : public Endpoint {
 public:
  explicit CudaEndpoint(Rank& rank);
  ~CudaEndpoint() final;

  const std::shared_ptr<Heap>& heap() const final { return regions_->heap(); }
  std::string SharingModeName(std::string* why) const final {
    *why = regions_->reasons();
    return NameOf(regions_->mode());
  }

  const Regions& regions() const { return *regions_; }

  void Run(const Call& call) final;
  void ReduceSlices(ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                    const Buffer& recv) final;

  void Send(const Buffer& send, int receiver) final;
  void Receive(const Buffer& recv, int sender) final;

  ExposedBuffer Expose(const Buffer& tensor, TeamId team, std::shared_ptr<const void> keep) final;
  PeerMemory PeerView(ExposedBuffer& exposed, int64_t shift) final;
  void Release(TeamId team, const std::vector<const ExposedBuffer*>& exposed) final;

  void Copy(const Buffer& source, const Buffer& target) final;
  void WriteNumber(int64_t number, const Buffer& recv) final;
  void Clear(const Buffer& recv) final;
  void Synchronise() final;
  void Settle() final;
  void CheckReports() final;
  void Follow(uint32_t generation) final;
  void FinishCommand() final;
  void SetStream(int64_t stream) final { compute_streams_.Use(stream); }
  void WaitStream(int64_t stream) final { compute_streams_.Await(stream); }
  bool LeaveStreams() final { return compute_streams_.Leave(); }
  std::unique_ptr<AsyncQueue> MakeAsyncQueue() final;

 private:
  friend class Enqueuing;
  friend class Operation;

  Member& MemberOf(TeamBarrier& barrier);
  /*! \brief Return whether a stream lives as long as this endpoint. */
  bool Outlasts(Stream stream) const;
  /*! \brief Make later work on a stream wait for everything enqueued on another stream so far. */
  void WaitForStream(Stream waiting, Stream other) const;
  /*! \brief Wait for all operations, and for `current` unless it is null. */
  void Drain(const Stream* current);
  /*! \brief Drain all operations and reset the team slots, after a recovery. */
  void StartAgain();
  void Launch(const char* what, Kernel kernel, const kernels::Launch& grid, Stream stream,
              void* arguments) const;
  void CopyOnStream(void* target, const void* source, size_t bytes, Stream stream) const;
  void* Grow(GrowOnlyBuffer& memory, size_t bytes);
  /*! \brief Throw the error that a kernel reported, if one did. */
  void CheckRecord(const kernels::ErrorRecord& record, Member* member) const;
  void CheckRecords();
  /*! \brief Compare the operations of all members on the host, after a kernel found a mismatch. All
   *         members have found it, and all of them throw the same message. */
  static void Compare(Member& member, const kernels::ErrorRecord& record);
  kernels::Guard GuardOf(uint32_t* failed, kernels::ErrorRecord* record) const;
  /*! \brief Return the arguments that both ends of a message have in common. */
  kernels::MessageArgs MessageOf(const Buffer& buffer, int peer);
  void RunMessage(const Buffer& buffer, int peer, bool sends);
  // The collectives, whose arguments have been checked, except for types.
#define TVM_IPC_DECLARE(Name, text, relation, mpi, cuda, ...) \
  TVM_IPC_IF_##cuda(void Name(Operation& operation, const Call& call);)
  TVM_IPC_COLLECTIVES(TVM_IPC_DECLARE)
#undef TVM_IPC_DECLARE
  void Move(Operation& operation, const Call& call, kernels::Header header, const MovePlan& plan);
  void BroadcastInSlices(Operation& operation, const Call& call, kernels::Header header);
  /*! \brief Throw if captured operations would have to synchronize on the host. */
  void RequireReplays(const char* operation) const;

  Rank& rank_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<const Kernels> kernels_;
  const Driver& driver_;
  /*! \brief The launch limits of the program's kernels, with room for asynchronous operations. */
  kernels::Limits limits_{kernels::kMaxBlocks, 1024};
  std::unique_ptr<OwnStream> stream_;
  /*! \brief The program stream of this rank, if ranks of this process share the device. */
  std::unique_ptr<OwnStream> program_stream_;
  /*!
   * \brief Whether ranks are threads of one process.
   *
   * In that case, a call that changes memory or loads code waits for everything that any of these
   * ranks has on its device, and blocks launches of the others meanwhile. Such a call must not come
   * between the launches of kernels that wait for each other. So the ranks synchronize on the host
   * before they launch such kernels, and again once all have launched. A kernel that waits for
   * something a single peer does is launched after the peer has launched that.
   */
  bool meets_ = false;
  /*! \brief Whether each rank has a device of its own, whose links no other rank uses. */
  bool apart_ = true;
  /*! \brief The ranks of this process on this device, and the streams that each of them has. */
  int ranks_here_ = 0;
  static constexpr int kStreamsOfRank = 4;
  /*! \brief The stream for copies of exposed buffers, concurrent with the program. */
  std::unique_ptr<OwnStream> copy_stream_;
  /*! \brief The stream of asynchronous operations. */
  std::shared_ptr<const OwnStream> async_stream_;
  std::unique_ptr<Regions> regions_;
  /*! \brief The streams on which the program runs kernels side by side. They end before the memory
   *         that the kernels use. */
  ComputeStreams compute_streams_;
  /*! \brief The page of the control block that holds the abort word. */
  std::shared_ptr<Pinned> control_page_;
  /*! \brief The device address of the abort word. */
  const uint32_t* abort_ = nullptr;
  /*! \brief One record for each team slot, and a last one for messages. */
  std::shared_ptr<kernels::ErrorRecord> records_;

  /*! \brief Guards the members below. Never held while waiting for another rank. */
  mutable std::mutex mutex_;
  std::map<const TeamBarrier*, Member> members_;
  std::vector<Order> sent_;
  std::vector<Order> received_;
  std::mutex recovery_mutex_;
  std::atomic<uint32_t> generation_{0};
};

/*! \brief An operation of a team. */
class Operation {
 public:
  Operation(CudaEndpoint& endpoint, TeamId team);

  int size() const { return member.size; }
  int place() const { return member.place; }
  const kernels::Limits& limits() const { return member.limits; }
  struct Input {
    uint64_t offset;
    /*! \brief Whether the operation may end while peers still read the input. */
    bool stays;
  };
  /*! \brief Return the offset of an input in this rank's region. Copy it there first if it is
   *         stored elsewhere. */
  Input PrepareInput(const void* data, size_t bytes, uint8_t flags);
  /*! \brief Return a buffer in the region for reduced slices, and its offset. */
  void* Scratch(size_t bytes, uint64_t* offset);
  /*! \brief Return a buffer for a sum, valid until the team's next one. */
  void* Sum(size_t bytes) { return endpoint_.Grow(member.sum, bytes); }
  /*! \brief Launch a kernel that waits for no other kernel. */
  void Launch(const char* what, Kernel kernel, const kernels::Launch& grid, void* arguments) const {
    endpoint_.Launch(what, kernel, grid, stream, arguments);
  }
  /*! \brief Launch kernels that wait for each other: one on each member, with the same header. */
  void LaunchTogether(const char* what, Kernel kernel, const kernels::Launch& grid,
                      const kernels::Header& header, void* arguments) const;
  /*! \brief Do the same once all members have already synchronized on the host. */
  void LaunchMet(const char* what, Kernel kernel, const kernels::Launch& grid,
                 void* arguments) const;
  void Copy(void* target, const void* source, size_t bytes) const {
    if (target != source) endpoint_.CopyOnStream(target, source, bytes, stream);
  }

  const OpGuard guard;
  Member& member;
  bool capturing = false;
  Stream stream;

 private:
  CudaEndpoint& endpoint_;
  Here here_;
  std::optional<Enqueuing> enqueuing_;
};

/*! \brief Return the descriptor of a header, which the host compares and prints. */
Descriptor DescriptorOf(const kernels::Header& header, const Member* member);
/*! \brief Return a header with an element type. */
kernels::Header HeaderOf(kernels::Operation operation, ElementType type, uint64_t count);
/*! \brief Return the header of a collective. */
kernels::Header HeaderOf(const Call& call);
/*! \brief Throw the error in a record. */
[[noreturn]] void FailRecord(const Rank& rank, const kernels::ErrorRecord& record,
                             const Member* member);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_CUDA_ENDPOINT_H_
