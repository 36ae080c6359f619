/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file attention_packed_function.h
 * \brief Packed function that computes attention of TVM tensors.
 */
#ifndef TVM_IPC_BLAS_ATTENTION_PACKED_FUNCTION_H_
#define TVM_IPC_BLAS_ATTENTION_PACKED_FUNCTION_H_

#include <tvm/ffi/function.h>

namespace tvm_ipc {

/*!
 * \brief Compute softmax(cap(scale * queries keys^T) + bias) values, without the scores in memory.
 *
 * Arguments: (query_axes, key_axes, value_axes, out_axes, scale, softcap, causal, window,
 * reproducible, queries, keys, values, *bias, out).
 *
 * With their axes permuted (as BlasMatmul packs permutations), queries are (batch, heads, queries,
 * depth), keys (batch, groups, keys, depth), values (batch, groups, keys, value depth) and out
 * (batch, heads, queries, value depth); heads is a multiple of groups. The depth must be the last
 * axis in memory. A softcap of 0 is none. `causal` is 0 for none, 1 to exclude keys after the query
 * with the same index, and 2 if the last query has the index of the last key. `window` is the
 * number of keys that a causal query sees, 0 for all. `reproducible` is 1 if a query must get the
 * same bits for any number of queries, and 0 for the fastest kernels. A bias broadcasts to (batch,
 * heads, queries, keys). Throws ValueError if an argument is wrong.
 */
void CpuAttention(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);

/*!
 * \brief The same for sequences that follow each other along the axis of tokens; the batch is 1.
 *
 * Arguments: (query_axes, key_axes, value_axes, out_axes, scale, softcap, causal, window,
 * reproducible, queries, keys, values, query_starts, key_starts, out). Sequence i has the queries
 * from query_starts[i] to query_starts[i + 1], and likewise the keys; both are of int32, begin with
 * 0 and end with the number of tokens. Throws ValueError if an argument is wrong.
 */
void CpuAttentionOfSequences(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_ATTENTION_PACKED_FUNCTION_H_
