/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file exposed_tensors_and_slices.h
 * \brief Exposed buffers of programs: tensors in the memory of peers, and slices of each rank.
 */
#ifndef TVM_IPC_DISCO_EXPOSED_TENSORS_AND_SLICES_H_
#define TVM_IPC_DISCO_EXPOSED_TENSORS_AND_SLICES_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "core/rank_runtime_state.h"
#include "disco/collectives_as_packed_functions.h"

namespace tvm_ipc {

/*! \brief Let the team read the tensor; return the value that `PeerViewTensor` and `ReleaseTensors`
 *         take. */
tvm::ffi::Any ExposeTensor(Rank& rank, tvm::ffi::Tensor tensor, TeamArgument team);
/*! \brief Return a tensor in the memory of a peer that has exposed it. */
tvm::ffi::Tensor PeerViewTensor(Rank& rank, tvm::ffi::Any exposed, int64_t shift,
                                tvm::ffi::Shape shape);
/*! \brief Synchronize the team in the first argument; afterwards no member reads the exposed
 * tensors in the others. */
void ReleaseTensors(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);

/*! \brief Return the slice of a tensor that belongs to the rank `shift` places after this one. */
tvm::ffi::Tensor OwnSliceTensor(Rank& rank, tvm::ffi::Tensor tensor, TeamArgument team,
                                int64_t shift, int64_t stride, int64_t offset,
                                tvm::ffi::Shape shape);
/*! \brief Reduce slices of all ranks of a team into the last argument. */
void ReduceSlices(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*! \brief Copy slices to their positions in the last argument. */
void AssembleSlices(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_EXPOSED_TENSORS_AND_SLICES_H_
