/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file batch_attention_packed_function.h
 * \brief Packed function that computes the attention of the next token of several requests.
 */
#ifndef TVM_IPC_BLAS_BATCH_ATTENTION_PACKED_FUNCTION_H_
#define TVM_IPC_BLAS_BATCH_ATTENTION_PACKED_FUNCTION_H_

#include <tvm/ffi/function.h>

namespace tvm_ipc {

/*!
 * \brief Write the key and value of a token of each request into its caches, and compute the
 *        attention of the token to all tokens of the request.
 *
 * Arguments: (key_cache, value_cache, scale, softcap, positions, caches, queries, keys, values,
 * *mask, out).
 *
 * positions is (batch, 1) of int64: the number of tokens before the token of each request. caches
 * has an array of caches for each request. Its elements `key_cache` and `value_cache` are (tokens,
 * groups, depth), each for as many tokens as the request may have. queries are batch * heads *
 * depth elements, keys batch * groups * depth, and likewise values and out, in this order in
 * memory; one of the axes of their four, the second or the third, has the extent 1. The mask, if
 * there is one, is (batch or 1, 1, 1, tokens) for the longest request, and is added to the scores.
 * A softcap of 0 is none. Throws ValueError if an argument is wrong.
 */
void CpuBatchAttention(tvm::ffi::PackedArgs args, tvm::ffi::Any* result);

}  // namespace tvm_ipc
#endif  // TVM_IPC_BLAS_BATCH_ATTENTION_PACKED_FUNCTION_H_
