/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file endpoint.h
 * \brief A rank on a device: it checks operations, puts kernels on the program's stream, and tells
 *        what they reported.
 *
 * Nothing here waits for a peer but shows, which meet on the host too. An operation returns when it
 * is on the stream; what goes wrong there is thrown by the next operation of the team, or by
 * Synchronise or Settle. Operations of one team go on one after the other: where the calling
 * thread's stream is another one than the last time, it waits for that one first. A stream that is
 * being captured (for a CUDA graph) waits for nothing: the order of replays is the program's.
 */
#ifndef TVM_IPC_CUDA_ENDPOINT_H_
#define TVM_IPC_CUDA_ENDPOINT_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/group.h"
#include "cuda/pinned.h"
#include "cuda/region.h"

namespace tvm_ipc::cuda {

/*! \brief Memory of the rank's own region that grows, and is never given back: graphs that were
 *         captured go on using what was there then. */
struct Growing {
  void* data = nullptr;
  size_t bytes = 0;
};

/*! \brief What operations follow each other on: they may come from several streams. */
struct Order {
  std::optional<Stream> last;
};

/*! \brief This rank's part in a team, from its first operation on. */
struct Member {
  Meeting* meeting = nullptr;
  int size = 0;
  int place = 0;
  /*! \brief "in team 3 (ranks 0, 2)", as errors have it. */
  std::string where;
  /*! \brief By place. */
  std::vector<int> ranks;
  kernels::TeamArgs args{};
  kernels::ErrorRecord* record = nullptr;
  /*! \brief Of its kernels: those of works share the device with those of the program. */
  kernels::Limits limits{1, 1};
  /*! \brief Whether it has met the others since a kernel found that they disagree. */
  bool compared = false;
  Order order;
  /*! \brief Where inputs are copied to that peers cannot read where they lie. */
  Growing stage;
  /*! \brief Where reduced slices lie until peers have them. */
  Growing scratch;
  /*! \brief Where a sum lies until it has been added and normalised. */
  Growing sum;
};

class Operation;
struct MovePlan;

class CudaEndpoint final : public Endpoint {
 public:
  explicit CudaEndpoint(Rank& rank);
  ~CudaEndpoint() final;

  const std::shared_ptr<Heap>& heap() const final { return regions_->heap(); }
  std::string Way(std::string* why) const final {
    *why = regions_->reasons();
    return NameOf(regions_->rung());
  }

  const Regions& regions() const { return *regions_; }

  void AllReduce(const Buffer& send, ReduceKind kind, TeamId team, Strategy strategy, uint8_t flags,
                 const Buffer& recv) final;
  void AllReduceNorm(const Buffer& send, const Buffer& residual, const Norm& norm, TeamId team,
                     Strategy strategy, uint8_t flags, const Buffer& residual_out,
                     const Buffer& norm_out) final;
  void ReduceScatter(const Buffer& send, ReduceKind kind, TeamId team, uint8_t flags,
                     const Buffer& recv) final;
  void Reduce(const Buffer& send, ReduceKind kind, int root, TeamId team, uint8_t flags,
              const Buffer* recv) final;
  void ReduceParts(ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                   const Buffer& recv) final;

  void AllGather(const Buffer& send, TeamId team, uint8_t flags, const Buffer& recv) final;
  void Broadcast(const Buffer* send, int root, TeamId team, uint8_t flags,
                 const Buffer& recv) final;
  void Scatter(const Buffer* send, int root, TeamId team, uint8_t flags, const Buffer& recv) final;
  void Gather(const Buffer& send, int root, TeamId team, uint8_t flags, const Buffer* recv) final;
  void AllToAll(const Buffer& send, const Parts& parts, TeamId team, uint8_t flags,
                const Buffer& recv) final;
  void Permute(const Buffer& send, const Sources& sources, TeamId team, uint8_t flags,
               const Buffer& recv) final;

  void Send(const Buffer& send, int receiver) final;
  void Receive(const Buffer& recv, int sender) final;

  Shown Show(const Buffer& tensor, TeamId team, std::shared_ptr<const void> keep) final;
  PeerMemory Peer(Shown& shown, int64_t shift) final;
  void Hide(TeamId team, const std::vector<const Shown*>& shown) final;

  void Copy(const Buffer& source, const Buffer& target) final;
  void WriteNumber(int64_t number, const Buffer& recv) final;
  void Synchronise() final;
  void Settle() final;
  void CheckReports() final;
  void Follow(uint32_t generation) final;
  void Rest() final;
  std::unique_ptr<Works> MakeWorks() final;

 private:
  friend class Operation;

  Member& MemberOf(Meeting& meeting);
  /*! \brief The calling thread's stream, which waits for what went before. */
  Stream Enter(Order& order, bool* capturing);
  /*! \brief Wait for all streams on which operations are, and for another one. */
  void Drain(const Stream* current);
  /*! \brief After a recovery: nothing is on the way any more, and seats start again. */
  void StartAgain();
  void Launch(const char* what, Kernel kernel, const kernels::Launch& grid, Stream stream,
              void* arguments) const;
  void CopyOnStream(void* target, const void* source, size_t bytes, Stream stream) const;
  void* Grow(Growing& memory, size_t bytes);
  /*! \brief Throw what a kernel reported, if one did. */
  void CheckRecord(const kernels::ErrorRecord& record, Member* member) const;
  void CheckRecords();
  /*! \brief When a kernel has found that members disagree: all of them have, so let all compare
   *         what they did on the host, which tells all of it in the same words everywhere. */
  static void Compare(Member& member, const kernels::ErrorRecord& record);
  kernels::Guard GuardOf(uint32_t* failed, kernels::ErrorRecord* record) const;
  /*! \brief What both ends of a message have in their arguments. */
  kernels::MessageArgs MessageOf(const Buffer& buffer, int peer);
  void Exchange(const Buffer& buffer, int peer, bool sends);
  void Move(Operation& operation, const char* what, kernels::Header header, const MovePlan& plan);
  void BroadcastInSlices(Operation& operation, kernels::Header header, const Buffer* send, int root,
                         const Buffer& recv);
  /*! \brief Throw where what is captured would have to meet on the host. */
  void RequireReplays(const char* operation) const;

  Rank& rank_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<const Kernels> kernels_;
  const Driver& driver_;
  /*! \brief The program's kernels, and those of works beside them. */
  kernels::Limits limits_{kernels::kMaxBlocks, 1024};
  std::unique_ptr<OwnStream> stream_;
  /*! \brief Where ranks of this process share the device: the stream of this one's program. */
  std::unique_ptr<OwnStream> program_stream_;
  /*!
   * \brief Whether ranks are threads of one process.
   *
   * Then calls that change memory or load code wait for what all of them have on their devices, and
   * keep the others from launching meanwhile. None of them must come between the launches of
   * kernels that wait for each other: who launches one meets the others on the host before, when
   * all are about to launch, and after, when all have. What waits for what a peer does alone is
   * launched when the peer has launched that.
   */
  bool meets_ = false;
  /*! \brief Whether each rank has a device of its own, whose links others do not use. */
  bool apart_ = true;
  /*! \brief Whether threads may capture all the same: TVM_IPC_CUDA_GRAPHS_OF_THREADS. */
  bool captures_ = false;
  /*! \brief Copies of what peers show, beside the program. */
  std::unique_ptr<OwnStream> copy_stream_;
  std::unique_ptr<Regions> regions_;
  /*! \brief The page of the control block with the abort word, and where the device sees it. */
  std::shared_ptr<Pinned> control_page_;
  const uint32_t* abort_ = nullptr;
  /*! \brief One for each seat, and the last one for messages. */
  std::shared_ptr<kernels::ErrorRecord> records_;

  /*! \brief Of what follows; held for as long as nobody else is waited for. */
  mutable std::mutex mutex_;
  std::map<const Meeting*, Member> members_;
  std::vector<Order> sent_;
  std::vector<Order> received_;
  std::mutex recovery_mutex_;
  std::atomic<uint32_t> generation_{0};
};

/*! \brief One operation of a team. */
class Operation {
 public:
  Operation(CudaEndpoint& endpoint, TeamId team);

  int size() const { return member.size; }
  int place() const { return member.place; }
  const kernels::Limits& limits() const { return member.limits; }
  void RequireRoot(const char* operation, int root) const;
  struct Input {
    uint64_t offset;
    /*! \brief Whether peers may be left reading it. */
    bool stays;
  };
  /*! \brief Where an input lies in this rank's region, copied there if it lies elsewhere. */
  Input Place(const void* data, size_t bytes, uint8_t flags);
  /*! \brief Room in the region for reduced slices, and where it lies. */
  void* Scratch(size_t bytes, uint64_t* offset);
  /*! \brief Room for a sum, until the team's next one. */
  void* Sum(size_t bytes) { return endpoint_.Grow(member.sum, bytes); }
  /*! \brief A kernel that waits for no other one. */
  void Launch(const char* what, Kernel kernel, const kernels::Launch& grid, void* arguments) const {
    endpoint_.Launch(what, kernel, grid, stream, arguments);
  }
  /*! \brief Kernels that wait for each other, one of each member with such a header. */
  void LaunchTogether(const char* what, Kernel kernel, const kernels::Launch& grid,
                      const kernels::Header& header, void* arguments) const;
  /*! \brief The same, when all members have met already. */
  void LaunchMet(const char* what, Kernel kernel, const kernels::Launch& grid,
                 void* arguments) const;
  void Copy(void* target, const void* source, size_t bytes) const {
    if (target != source) endpoint_.CopyOnStream(target, source, bytes, stream);
  }

  const Turn turn;
  Member& member;
  bool capturing = false;
  Stream stream;

 private:
  CudaEndpoint& endpoint_;
  Here here_;
};

/*! \brief What a header says, as the host compares and tells it. */
Descriptor DescriptorOf(const kernels::Header& header, const Member* member);
/*! \brief How headers carry the type of elements, and the flags of a collective. */
kernels::Header HeaderOf(kernels::Operation operation, ElementType type, uint64_t count,
                         uint8_t flags);
/*! \brief Throw what a record says. */
[[noreturn]] void FailRecord(const Rank& rank, const kernels::ErrorRecord& record,
                             const Member* member);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_ENDPOINT_H_
