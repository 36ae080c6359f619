/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file shows.h
 * \brief Shows of programs: tensors over what peers show, and the parts that each rank has.
 */
#ifndef TVM_IPC_DISCO_SHOWS_H_
#define TVM_IPC_DISCO_SHOWS_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include "core/group.h"
#include "disco/as_packed.h"

namespace tvm_ipc {

/*! \brief From now on the team may read the tensor. Returns what `PeerTensor` and hide take. */
tvm::ffi::Any ShowTensor(Rank& rank, tvm::ffi::Tensor tensor, TeamArgument team);
/*! \brief What another rank has shown, as a tensor in its memory. */
tvm::ffi::Tensor PeerTensor(Rank& rank, tvm::ffi::Any shown, int64_t shift, tvm::ffi::Shape shape);
/*! \brief The team meets; then nobody reads the rest of the arguments, which it was shown. */
void HideTensors(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);

/*! \brief The part of a tensor that belongs to the rank `shift` places after this one. */
tvm::ffi::Tensor PartTensor(Rank& rank, tvm::ffi::Tensor tensor, TeamArgument team, int64_t shift,
                            int64_t stride, int64_t offset, tvm::ffi::Shape shape);
/*! \brief Reduce the parts of all ranks of a team into the last argument. */
void ReduceParts(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);
/*! \brief Copy parts to where they belong in the last argument. */
void JoinParts(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_SHOWS_H_
