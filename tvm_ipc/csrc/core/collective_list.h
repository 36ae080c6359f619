/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file collective_list.h
 * \brief The list of collectives. Their enumeration, names, argument checks, bytes received,
 *        backends and packed functions derive from it.
 *
 * `tvm_ipc/packed_functions` describes the same functions to the compiler; a test compares the
 * names and parameters of both.
 *
 * To add a collective, add an entry, and a kernel `void Name(Team&, const Call&)` in a file of
 * shm/. To run it on another backend, set that backend's column to 1, and add a kernel with the
 * signature of the backend.
 */
#ifndef TVM_IPC_CORE_COLLECTIVE_LIST_H_
#define TVM_IPC_CORE_COLLECTIVE_LIST_H_

/*!
 * \brief Call ENTRY(Name, text, relation, mpi, cuda, nccl, Parameter...) for each collective.
 *
 *   Name        of its kernels, and of the enumerator `Collective::kName`
 *   text        its name; programs call "tvm_ipc." and this
 *   relation    how the sizes of its buffers are related (core/check_collective_arguments.h)
 *   mpi...      1 if the backend has a kernel for it; shm has kernels for all
 *   Parameter   its parameters in order: classes of disco/collectives_as_packed_functions.h, which
 *               set the fields of a `Call`
 *
 * With members in team order, recv is
 *
 *   AllReduce           the reduction of all sends
 *   AllReduceRmsNorm    residual + the sum of all sends; norm_out is the RMSNorm of its rows
 *   AllReduceLayerNorm  likewise, with a LayerNorm
 *   ReduceScatter       this member's slice of the reduction
 *   Reduce              the reduction, on the root
 *   AllToAll            the slices of all sends that are for this member
 *   RaggedAllToAll      the rows of all sends that are for this member; each sender has the number
 *                       of its rows for each member in a tensor
 *   AllGather           all sends
 *   Broadcast           the send of the root
 *   Scatter             this member's slice of the send of the root
 *   Gather              all sends, on the root
 *   Permute             the send of the member that this one receives from, or zeros
 */
#define TVM_IPC_COLLECTIVES(ENTRY)                                                                 \
  ENTRY(AllReduce, "allreduce", kEqual, 1, 1, 1, Send, Kind, Team, AllReduceStrategy, Flags, Recv) \
  ENTRY(AllReduceRmsNorm, "allreduce_rms_norm", kNorm, 1, 1, 1, Send, Residual, Weight, Epsilon,   \
        Team, AllReduceStrategy, Flags, ResidualOut, NormOut)                                      \
  ENTRY(AllReduceLayerNorm, "allreduce_layer_norm", kNorm, 1, 1, 1, Send, Residual, Weight, Bias,  \
        Epsilon, Team, AllReduceStrategy, Flags, ResidualOut, NormOut)                             \
  ENTRY(ReduceScatter, "reduce_scatter", kSendIsLarger, 1, 1, 1, Send, Kind, Team, Flags, Recv)    \
  ENTRY(Reduce, "reduce", kEqual, 1, 1, 1, Send, Kind, Root, Team, Flags, RecvOfRoot)              \
  ENTRY(AllToAll, "all_to_all", kSplits, 1, 1, 1, Send, Splits, Team, Flags, Recv)                 \
  ENTRY(RaggedAllToAll, "ragged_all_to_all", kRagged, 1, 1, 1, SendRows, Counts, Team, Flags,      \
        Recv, RecvCounts)                                                                          \
  ENTRY(AllGather, "allgather", kRecvIsLarger, 1, 1, 1, Send, Team, Flags, Recv)                   \
  ENTRY(Broadcast, "broadcast", kEqual, 1, 1, 1, SendOfRoot, Root, Team, Flags, Recv)              \
  ENTRY(Scatter, "scatter", kSendIsLarger, 1, 1, 1, SendOfRoot, Root, Team, Flags, Recv)           \
  ENTRY(Gather, "gather", kRecvIsLarger, 1, 1, 1, Send, Root, Team, Flags, RecvOfRoot)             \
  ENTRY(Permute, "permute", kEqualAndApart, 1, 1, 1, Send, Sources, Team, Flags, Recv)

/*!
 * \brief Call ENTRY(text, Name, Parameter...) for each collective that Disco dispatches to the
 *        function `text` of a backend. Its other arguments are the defaults of `Call`.
 */
#define TVM_IPC_COLLECTIVES_OF_DISCO(ENTRY)                          \
  ENTRY("allreduce", AllReduce, Send, Kind, Team, Recv)              \
  ENTRY("allgather", AllGather, Send, Team, Recv)                    \
  ENTRY("broadcast_from_worker0", Broadcast, SendOfRoot, Team, Recv) \
  ENTRY("scatter_from_worker0", Scatter, SendOfRoot, Team, Recv)     \
  ENTRY("gather_to_worker0", Gather, Send, Team, RecvOfRoot)

/*! \brief Code for the collectives with 1 in a column: TVM_IPC_IF_##column(code). */
#define TVM_IPC_IF_0(...)
#define TVM_IPC_IF_1(...) __VA_ARGS__

#endif  // TVM_IPC_CORE_COLLECTIVE_LIST_H_
