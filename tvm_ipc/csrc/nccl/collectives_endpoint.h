/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file collectives_endpoint.h
 * \brief The endpoint of a rank that communicates through NCCL.
 */
#ifndef TVM_IPC_NCCL_COLLECTIVES_ENDPOINT_H_
#define TVM_IPC_NCCL_COLLECTIVES_ENDPOINT_H_

#include <memory>

#include "core/communication_backend.h"
#include "driver/compute_streams.h"
#include "nccl/team_communicators_and_watch_thread.h"

namespace tvm_ipc::nccl {

/*!
 * \brief The endpoint of a rank. Every operation is enqueued on the calling thread's stream, then
 *        returns.
 *
 * Peers read a rank's memory only in operations in which the rank takes part. So no barrier is
 * needed to protect inputs, and the promises in `flags` have no effect.
 */
class NcclEndpoint final : public Endpoint {
 public:
  explicit NcclEndpoint(Rank& rank);

  /*! \brief Return the heap in device memory, which peers do not map. */
  const std::shared_ptr<Heap>& heap() const final { return heap_; }

  void Run(const Call& call) final;
  /*! \brief Enqueue a send. Later work on the stream may overwrite the buffer. */
  void Send(const Buffer& send, int receiver) final;
  void Receive(const Buffer& recv, int sender) final;

  void Copy(const Buffer& source, const Buffer& target) final;
  void WriteNumber(int64_t number, const Buffer& recv) final;
  void Clear(const Buffer& recv) final;
  void Synchronise() final { Settle(); }
  void Settle() final {
    compute_streams_.AwaitAll();
    communicators_.Settle();
  }
  void SetStream(int64_t stream) final { compute_streams_.Use(stream); }
  void WaitStream(int64_t stream) final { compute_streams_.Await(stream); }
  bool LeaveStreams() final { return compute_streams_.Leave(); }
  void CheckReports() final { communicators_.Check(); }
  void Follow(uint32_t generation) final { communicators_.Follow(generation); }
  std::unique_ptr<AsyncQueue> MakeAsyncQueue() final;

 private:
  Rank& rank_;
  Communicators communicators_;
  std::shared_ptr<Heap> heap_;
  /*! \brief The streams on which the program runs kernels side by side. They end before the memory
   *         that the kernels use. */
  cuda::ComputeStreams compute_streams_;
};

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_COLLECTIVES_ENDPOINT_H_
