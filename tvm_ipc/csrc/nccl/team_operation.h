/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file team_operation.h
 * \brief A team operation on one member.
 */
#ifndef TVM_IPC_NCCL_TEAM_OPERATION_H_
#define TVM_IPC_NCCL_TEAM_OPERATION_H_

#include <cstdint>
#include <vector>

#include "core/collective_call.h"
#include "core/error.h"
#include "core/rank_runtime_state.h"
#include "nccl/team_communicators_and_watch_thread.h"

namespace tvm_ipc::nccl {

class Team {
 public:
  Team(Communicators& communicators, TeamId id)
      : members_(communicators.Gather(id)), communicators_(communicators) {}

  int size() const { return members_.size(); }
  /*! \brief Return this rank's index in the team. */
  int index() const { return members_.index(); }
  int rank(int index) const { return members_.rank(index); }

  /*! \brief Run the operation. If the team has one member or there is no data, only synchronize. */
  void Run(const Call& call, const Communicators::Launch& launch) {
    Run(call, DescriptorOf(call, rank(call.root)).count > 0, launch);
  }
  /*! \brief Run a part of an operation. */
  void Run(const Call& call, bool has_data, const Communicators::Launch& launch) {
    const Descriptor mine = DescriptorOf(call, rank(call.root));
    if (size() > 1 && has_data) return communicators_.Run(members_, mine, launch);
    communicators_.Check();
    members_.Enter(mine);
  }

  /*! \brief Wait for the member's stream, and return int64 numbers that it has written. */
  std::vector<int64_t> ReadNumbers(const Call& call, const Buffer& buffer) const {
    const cuda::Device& device = communicators_.device();
    const cuda::Here here(device);
    const cuda::Stream stream = communicators_.stream();
    int state = cuda::kNotCapturing;
    device.driver().cuStreamIsCapturing("to see whether a graph is captured", stream, &state);
    if (state != cuda::kNotCapturing) {
      Fail(kind::kRuntime, Name(call.collective),
           ": a CUDA graph is being captured, but the host has to read the counts; leave it out of"
           " graphs");
    }
    communicators_.Settle();
    std::vector<int64_t> numbers(buffer.count);
    device.driver().cuMemcpyAsync("to read counts", reinterpret_cast<cuda::Address>(numbers.data()),
                                  reinterpret_cast<cuda::Address>(buffer.data), buffer.bytes(),
                                  stream);
    device.driver().cuStreamSynchronize("to read counts", stream);
    return numbers;
  }
  /*! \brief Enqueue zeros for a buffer on the member's stream. */
  void Clear(const Buffer& buffer) const {
    if (buffer.bytes() == 0) return;
    const cuda::Device& device = communicators_.device();
    const cuda::Here here(device);
    device.driver().cuMemsetD8Async("to clear memory", reinterpret_cast<cuda::Address>(buffer.data),
                                    0, buffer.bytes(), communicators_.stream());
  }
  /*! \brief Enqueue a copy within this member on its stream. */
  void Copy(const uint8_t* from, uint8_t* to, size_t bytes) const {
    if (from == to || bytes == 0) return;
    const cuda::Device& device = communicators_.device();
    const cuda::Here here(device);
    device.driver().cuMemcpyAsync("to copy on a device", reinterpret_cast<cuda::Address>(to),
                                  reinterpret_cast<cuda::Address>(from), bytes,
                                  communicators_.stream());
  }

 private:
  Gathering members_;
  Communicators& communicators_;
};

// The kernels, which get calls whose arguments have been checked, except for types.
#define TVM_IPC_DECLARE(Name, text, relation, mpi, cuda, nccl, ...) \
  TVM_IPC_IF_##nccl(void Name(Team& team, const Call& call);)
TVM_IPC_COLLECTIVES(TVM_IPC_DECLARE)
#undef TVM_IPC_DECLARE

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_TEAM_OPERATION_H_
