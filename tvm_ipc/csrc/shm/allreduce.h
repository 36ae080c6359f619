/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file allreduce.h
 * \brief The algorithms of an all-reduce, with a sink for the reduced elements.
 */
#ifndef TVM_IPC_SHM_ALLREDUCE_H_
#define TVM_IPC_SHM_ALLREDUCE_H_

#include <cstddef>
#include <functional>

#include "core/communication_backend.h"
#include "shm/select_kernels_by_instruction_set.h"
#include "shm/team_operation.h"

namespace tvm_ipc {

/*! \brief Receives the reduced elements of an all-reduce, piece by piece. */
class Sink {
 public:
  virtual ~Sink() = default;
  /*! \brief Store the reduction of the sources, which begin at element `at`. */
  virtual void Reduce(size_t at, const void* const* sources, int num_sources, size_t count) = 0;
  /*! \brief Store elements from `at` on, which are already reduced. */
  virtual void Copy(size_t at, const void* reduced, size_t count) = 0;
  /*! \brief Return whether each piece must begin where the last one ended. */
  virtual bool in_order() const = 0;
};

/*!
 * \brief Reduce the sends of all members with the fastest algorithm.
 * \param reduce The kernel that the sink uses.
 * \param mine This rank's descriptor.
 */
void AllReduceInto(Team& team, const Buffer& send, ReduceFn reduce, const Descriptor& mine,
                   Sink& sink);

/*! \brief An all-reduce into the sink, with the sink's kernel. */
using NormRun = std::function<void(ReduceFn sum, Sink& sink)>;

/*! \brief Run an all-reduce with a norm by the caller's all-reduce. */
void AllReduceNormBy(const Call& call, const NormRun& run);

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_ALLREDUCE_H_
