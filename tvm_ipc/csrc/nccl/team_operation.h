/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file team_operation.h
 * \brief A team operation on one member.
 */
#ifndef TVM_IPC_NCCL_TEAM_OPERATION_H_
#define TVM_IPC_NCCL_TEAM_OPERATION_H_

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

  /*! \brief Throw if no member has the index `root`. */
  void RequireRoot(const char* operation, int root) const {
    if (root >= 0 && root < size()) return;
    Fail(kind::kValue, operation, ": there is no root ", root, " in a team of ", size(),
         "; it is an index in the team, from 0 on");
  }

  /*! \brief Run the operation. If the team has one member or there is no data, only synchronize. */
  void Run(const Descriptor& mine, size_t bytes, const Communicators::Launch& launch) {
    if (size() > 1 && bytes > 0) return communicators_.Run(members_, mine, launch);
    communicators_.Check();
    members_.Enter(mine);
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

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_TEAM_OPERATION_H_
