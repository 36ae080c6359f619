/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file buffer_size_and_overlap_checks.h
 * \brief Checks of the arguments of operations, with the error messages of the backend shm.
 */
#ifndef TVM_IPC_CUDA_BUFFER_SIZE_AND_OVERLAP_CHECKS_H_
#define TVM_IPC_CUDA_BUFFER_SIZE_AND_OVERLAP_CHECKS_H_

#include <cstdint>
#include <vector>

#include "core/communication_backend.h"

namespace tvm_ipc::cuda {

/*! \brief Throw unless the type and the number of elements are the same. */
void RequireEqual(const char* operation, const Buffer& send, const Buffer& recv);
void RequireType(const char* operation, const Buffer& send, const Buffer& recv);
/*! \brief Throw if the buffers overlap partially. */
void RequireEqualOrApart(const char* operation, const Buffer& send, const Buffer& recv);
/*! \brief Throw if the buffers overlap, unless the smaller one starts at `place` in the larger one,
 *         where the data stays. */
void RequireInPlaceOrApart(const char* operation, const Buffer& send, const Buffer& recv,
                           const uint8_t* place);
/*! \brief Throw if the buffers overlap. */
void RequireApart(const char* operation, const Buffer& send, const Buffer& recv);
void RequireNorm(const char* operation, const Buffer& send, const Buffer& residual,
                 const Norm& norm, const Buffer& residual_out, const Buffer& norm_out);
/*! \brief Throw unless the parts of an all-to-all match the tensors. */
void RequireParts(const Buffer& send, const SplitCounts& parts, size_t size, size_t place,
                  const Buffer& recv);
/*! \brief Throw unless there is one source for each member of the team, and each source is a member
 *         or -1. */
void RequireSources(const Sources& sources, int size);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_BUFFER_SIZE_AND_OVERLAP_CHECKS_H_
