/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file checks.h
 * \brief What operations refuse, in the words of the backend shm.
 */
#ifndef TVM_IPC_CUDA_CHECKS_H_
#define TVM_IPC_CUDA_CHECKS_H_

#include <cstdint>
#include <vector>

#include "core/backend.h"

namespace tvm_ipc::cuda {

/*! \brief Throw unless the type and the number of elements are the same. */
void RequireEqual(const char* operation, const Buffer& send, const Buffer& recv);
void RequireType(const char* operation, const Buffer& send, const Buffer& recv);
/*! \brief Throw if they overlap in part. */
void RequireEqualOrApart(const char* operation, const Buffer& send, const Buffer& recv);
/*! \brief Throw if they overlap, but not where what stays in its place has it. */
void RequireInPlaceOrApart(const char* operation, const Buffer& send, const Buffer& recv,
                           const uint8_t* place);
/*! \brief Throw if they overlap. */
void RequireApart(const char* operation, const Buffer& send, const Buffer& recv);
void RequireNorm(const char* operation, const Buffer& send, const Buffer& residual,
                 const Norm& norm, const Buffer& residual_out, const Buffer& norm_out);
/*! \brief Throw unless the parts of an all-to-all are those of the tensors. */
void RequireParts(const Buffer& send, const Parts& parts, size_t size, size_t place,
                  const Buffer& recv);
/*! \brief Throw unless there is one for each member of the team, and each is one, or -1. */
void RequireSources(const Sources& sources, int size);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_CHECKS_H_
