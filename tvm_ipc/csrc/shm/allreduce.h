/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file allreduce.h
 * \brief The ways of an all-reduce, for whatever is done with what comes out.
 */
#ifndef TVM_IPC_SHM_ALLREDUCE_H_
#define TVM_IPC_SHM_ALLREDUCE_H_

#include <cstddef>
#include <functional>

#include "core/backend.h"
#include "shm/reduce.h"
#include "shm/team.h"

namespace tvm_ipc {

/*! \brief Where the reduced elements of an all-reduce go, piece by piece. */
class Sink {
 public:
  virtual ~Sink() = default;
  /*! \brief Elements from `at` on are the reduction of these sources, which begin with them. */
  virtual void Reduce(size_t at, const void* const* sources, int num_sources, size_t count) = 0;
  /*! \brief Elements from `at` on were reduced already. */
  virtual void Copy(size_t at, const void* reduced, size_t count) = 0;
  /*! \brief Whether each piece has to begin where the last one ended. */
  virtual bool in_order() const = 0;
};

/*!
 * \brief Reduce what all members send, in the way that suits it.
 * \param reduce The kernel that the sink uses.
 * \param mine What this rank shows, but for the strategy.
 */
void AllReduceInto(Team& team, const Buffer& send, ReduceFn reduce, Strategy strategy,
                   Descriptor mine, Sink& sink);

/*! \brief All-reduces into the sink; the kernel is the sink's, and a descriptor says the rest. */
using NormRun = std::function<void(ReduceFn sum, Descriptor mine, Sink& sink)>;

/*! \brief `AllReduceNorm`, with an all-reduce of the caller's, once all is checked. */
void AllReduceNormBy(const Buffer& send, const Buffer& residual, const Norm& norm, uint8_t flags,
                     const Buffer& residual_out, const Buffer& norm_out, const NormRun& run);

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_ALLREDUCE_H_
