/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file endpoint_and_backend.h
 * \brief The backend between CPUs of one machine, over memory that all workers map.
 *
 * Peers read inputs in the rank's arena in place; other inputs are staged.
 */
#ifndef TVM_IPC_SHM_ENDPOINT_AND_BACKEND_H_
#define TVM_IPC_SHM_ENDPOINT_AND_BACKEND_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/communication_backend.h"

namespace tvm_ipc {

class SharedMemoryEndpoint : public Endpoint {
 public:
  explicit SharedMemoryEndpoint(Rank& rank);

  const std::shared_ptr<Heap>& heap() const final { return heap_; }
  void Run(const Call& call) override;
  void Send(const Buffer& send, int receiver) override;
  void Receive(const Buffer& recv, int sender) override;
  ExposedBuffer Expose(const Buffer& tensor, TeamId team,
                       std::shared_ptr<const void> keep) override;
  PeerMemory PeerView(ExposedBuffer& exposed, int64_t shift) override;
  void Release(TeamId team, const std::vector<const ExposedBuffer*>& all) override;
  /*! \brief All slices are in memory of this machine. */
  void ReduceSlices(ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                    const Buffer& recv) final;
  void Copy(const Buffer& source, const Buffer& target) final;
  /*! \brief Return at once: no user memory is in flight when an operation returns. */
  void Synchronise() final {}
  uint64_t BytesReceived() const final { return bytes_received_; }

 protected:
  /*! \brief Count the bytes that have arrived in a call that has run, and return them. */
  size_t CountBytes(const Call& call, int size, int index) {
    const size_t bytes =
        size > 1 ? BytesArriving(call, static_cast<size_t>(size), static_cast<size_t>(index)) : 0;
    bytes_received_ += bytes;
    return bytes;
  }

  Rank& rank_;

 private:
  std::atomic<uint64_t> bytes_received_{0};
  std::shared_ptr<Heap> heap_;
};

class SharedMemoryBackend : public Backend {
 public:
  const char* name() const override { return "shm"; }
  Capabilities capabilities() const final;
  std::vector<File> Prepare(const Control& control) const final;
  std::unique_ptr<Endpoint> Start(Rank& rank) const override;
  bool Reduces(ElementType type, ReduceKind kind) const final;
  std::vector<std::string> instruction_sets() const final;
  std::string instruction_set() const final;
  bool UseInstructionSet(const std::string& name) const final;
};

const Backend& SharedMemory();

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_ENDPOINT_AND_BACKEND_H_
