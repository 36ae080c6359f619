/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file endpoint.h
 * \brief The operations between ranks, by NCCL.
 */
#ifndef TVM_IPC_NCCL_ENDPOINT_H_
#define TVM_IPC_NCCL_ENDPOINT_H_

#include <memory>

#include "core/backend.h"
#include "nccl/communicators.h"

namespace tvm_ipc::nccl {

/*!
 * \brief A rank's part. Every operation is enqueued on the calling thread's stream and returns.
 *
 * Peers never read a rank's memory but in operations that it takes part in, so no barrier protects
 * inputs, and flags promise nothing that is needed.
 */
class NcclEndpoint final : public Endpoint {
 public:
  explicit NcclEndpoint(Rank& rank);

  /*! \brief Memory of the device, which peers do not map. */
  const std::shared_ptr<Heap>& heap() const final { return heap_; }

  void AllReduce(const Buffer& send, ReduceKind kind, TeamId team, Strategy strategy, uint8_t flags,
                 const Buffer& recv) final;
  void ReduceScatter(const Buffer& send, ReduceKind kind, TeamId team, uint8_t flags,
                     const Buffer& recv) final;
  void Reduce(const Buffer& send, ReduceKind kind, int root, TeamId team, uint8_t flags,
              const Buffer* recv) final;
  void AllGather(const Buffer& send, TeamId team, uint8_t flags, const Buffer& recv) final;
  void Broadcast(const Buffer* send, int root, TeamId team, uint8_t flags,
                 const Buffer& recv) final;
  void Scatter(const Buffer* send, int root, TeamId team, uint8_t flags, const Buffer& recv) final;
  void Gather(const Buffer& send, int root, TeamId team, uint8_t flags, const Buffer* recv) final;
  void AllToAll(const Buffer& send, const Parts& parts, TeamId team, uint8_t flags,
                const Buffer& recv) final;
  void Permute(const Buffer& send, const Sources& sources, TeamId team, uint8_t flags,
               const Buffer& recv) final;
  void AllReduceNorm(const Buffer& send, const Buffer& residual, const Norm& norm, TeamId team,
                     Strategy strategy, uint8_t flags, const Buffer& residual_out,
                     const Buffer& norm_out) final;
  /*! \brief The buffer may be written again in the order of the stream. */
  void Send(const Buffer& send, int receiver) final;
  void Receive(const Buffer& recv, int sender) final;

  void Copy(const Buffer& source, const Buffer& target) final;
  void WriteNumber(int64_t number, const Buffer& recv) final;
  void Synchronise() final { communicators_.Settle(); }
  void Settle() final { communicators_.Settle(); }
  void CheckReports() final { communicators_.Check(); }
  void Follow(uint32_t generation) final { communicators_.Follow(generation); }
  std::unique_ptr<Works> MakeWorks() final;

 private:
  Rank& rank_;
  Communicators communicators_;
  std::shared_ptr<Heap> heap_;
};

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_ENDPOINT_H_
