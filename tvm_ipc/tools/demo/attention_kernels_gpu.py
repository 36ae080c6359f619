# SPDX-License-Identifier: Apache-2.0
"""TIR kernels for GPUs, with the same results and layouts as those in `kernels_cpu`.

A thread block processes one head of one token. The kernels bind their threads themselves, because
TVM only schedules operators.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from tvm import tirx
from tvm.script import tirx as T  # noqa: N812

from tvm_ipc.errors import IPCError

#: Threads of a block.
THREADS: Final = 128
#: Shared memory of a block in bytes, as available on every GPU.
SHARED: Final = 48 << 10
#: The longest context whose scores fit into the shared memory of a block.
LONGEST: Final = SHARED // 4 - 2 * THREADS

_LOWEST: Final = -1e30
_FULL: Final = "the KV cache is full: the sequence is longer than the context of the model"


@cache
def rotate_and_append(
    heads: int, kv_heads: int, dim: int, context: int, dtype: str
) -> tirx.PrimFunc:
    """Return a kernel that rotates queries and keys, and appends keys and values to the cache."""
    half = dim // 2
    width = (heads + 2 * kv_heads) * dim
    groups = heads + 2 * kv_heads

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def rotate_and_append(
        qkv_handle: T.handle,
        angles_handle: T.handle,
        keys_handle: T.handle,
        values_handle: T.handle,
        n: T.int64,
        total: T.int64,
        queries_handle: T.handle,
    ) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        rows = T.int64()
        qkv = T.match_buffer(qkv_handle, (rows, width), dtype)
        angles = T.match_buffer(angles_handle, (context, dim), "float32")
        keys = T.match_buffer(keys_handle, (kv_heads, dim, context), dtype)
        values = T.match_buffer(values_handle, (kv_heads, context, dim), dtype)
        queries = T.match_buffer(queries_handle, (rows, heads, dim), dtype)
        assert total <= context, _FULL
        for block in T.thread_binding(n * groups, thread="blockIdx.x"):
            for thread in T.thread_binding(THREADS, thread="threadIdx.x"):
                for step in range((half + THREADS - 1) // THREADS):
                    i = block // groups
                    g = block % groups
                    d = step * THREADS + thread
                    at = total - n + i
                    if d < half:
                        if g < heads:
                            queries[i, g, d] = T.Cast(
                                dtype,
                                T.Cast("float32", qkv[i, g * dim + d]) * angles[at, d]
                                - T.Cast("float32", qkv[i, g * dim + half + d])
                                * angles[at, half + d],
                            )
                            queries[i, g, half + d] = T.Cast(
                                dtype,
                                T.Cast("float32", qkv[i, g * dim + half + d]) * angles[at, d]
                                + T.Cast("float32", qkv[i, g * dim + d]) * angles[at, half + d],
                            )
                        else:
                            if g < heads + kv_heads:
                                keys[g - heads, d, at] = T.Cast(
                                    dtype,
                                    T.Cast("float32", qkv[i, g * dim + d]) * angles[at, d]
                                    - T.Cast("float32", qkv[i, g * dim + half + d])
                                    * angles[at, half + d],
                                )
                                keys[g - heads, half + d, at] = T.Cast(
                                    dtype,
                                    T.Cast("float32", qkv[i, g * dim + half + d]) * angles[at, d]
                                    + T.Cast("float32", qkv[i, g * dim + d]) * angles[at, half + d],
                                )
                            else:
                                values[g - heads - kv_heads, at, d] = qkv[i, g * dim + d]
                                values[g - heads - kv_heads, at, half + d] = qkv[
                                    i, g * dim + half + d
                                ]

    return rotate_and_append


@cache
def attend(heads: int, kv_heads: int, dim: int, context: int, dtype: str) -> tirx.PrimFunc:
    """Return a kernel for causal attention of the last n of `total` tokens.

    Rows of padding become zeros.
    """
    if context > LONGEST:
        raise IPCError(
            f"the context is {context}, but the demo's attention kernel for GPUs supports at most "
            f"{LONGEST} positions; use a shorter --context"
        )
    group = heads // kv_heads
    scale = dim**-0.5
    room = -(-context // THREADS) * THREADS

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def attend(
        queries_handle: T.handle,
        keys_handle: T.handle,
        values_handle: T.handle,
        n: T.int64,
        total: T.int64,
        result_handle: T.handle,
    ) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        rows = T.int64()
        queries = T.match_buffer(queries_handle, (rows, heads, dim), dtype)
        keys = T.match_buffer(keys_handle, (kv_heads, dim, context), dtype)
        values = T.match_buffer(values_handle, (kv_heads, context, dim), dtype)
        result = T.match_buffer(result_handle, (rows, heads * dim), dtype)
        scores = T.sblock_alloc_buffer((room,), "float32", scope="shared")
        maxima = T.sblock_alloc_buffer((THREADS,), "float32", scope="shared")
        sums = T.sblock_alloc_buffer((THREADS,), "float32", scope="shared")
        best = T.sblock_alloc_buffer((1,), "float32", scope="local")
        acc = T.sblock_alloc_buffer((1,), "float32", scope="local")
        for block in T.thread_binding(rows * heads, thread="blockIdx.x"):
            for thread in T.thread_binding(THREADS, thread="threadIdx.x"):
                # Blocks of padding rows compute results that are not used.
                h = block % heads
                row = block // heads
                i = T.min(row, n - 1)
                last = total - n + i
                best[0] = T.float32(_LOWEST)
                for step in range(last // THREADS + 1):
                    acc[0] = T.float32(0)
                    for d in range(dim):
                        acc[0] = acc[0] + T.Cast("float32", queries[i, h, d]) * T.Cast(
                            "float32",
                            keys[h // group, d, T.min(step * THREADS + thread, last)],
                        )
                    scores[step * THREADS + thread] = T.Select(
                        step * THREADS + thread <= last,
                        acc[0] * T.float32(scale),
                        T.float32(_LOWEST),
                    )
                    best[0] = T.max(best[0], scores[step * THREADS + thread])
                maxima[thread] = best[0]
                for t in range(THREADS):
                    best[0] = T.max(best[0], maxima[t])
                acc[0] = T.float32(0)
                for step in range(last // THREADS + 1):
                    scores[step * THREADS + thread] = T.exp(
                        scores[step * THREADS + thread] - best[0]
                    )
                    acc[0] = acc[0] + scores[step * THREADS + thread]
                sums[thread] = acc[0]
                acc[0] = T.float32(0)
                for t in range(THREADS):
                    acc[0] = acc[0] + sums[t]
                for step in range((dim + THREADS - 1) // THREADS):
                    if step * THREADS + thread < dim:
                        best[0] = T.float32(0)
                        for j in range(last + 1):
                            best[0] = best[0] + scores[j] * T.Cast(
                                "float32", values[h // group, j, step * THREADS + thread]
                            )
                        result[row, h * dim + step * THREADS + thread] = T.Cast(
                            dtype, T.Select(row < n, best[0] / acc[0], T.float32(0))
                        )

    return attend


@cache
def argmax(length: int) -> tirx.PrimFunc:
    """Return a kernel for the index of the first maximum."""

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def argmax(x_handle: T.handle, index_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        x = T.match_buffer(x_handle, (length,), "float32")
        index = T.match_buffer(index_handle, (1,), "int32")
        bests = T.sblock_alloc_buffer((THREADS,), "float32", scope="shared")
        indices = T.sblock_alloc_buffer((THREADS,), "int32", scope="shared")
        best = T.sblock_alloc_buffer((1,), "float32", scope="local")
        best_index = T.sblock_alloc_buffer((1,), "int32", scope="local")
        for _block in T.thread_binding(1, thread="blockIdx.x"):
            for thread in T.thread_binding(THREADS, thread="threadIdx.x"):
                best[0] = T.float32(_LOWEST)
                best_index[0] = 0
                for step in range((length + THREADS - 1) // THREADS):
                    if step * THREADS + thread < length:  # noqa: SIM102 - no load beyond the end
                        if x[step * THREADS + thread] > best[0]:
                            best[0] = x[step * THREADS + thread]
                            best_index[0] = T.Cast("int32", step * THREADS + thread)
                bests[thread] = best[0]
                indices[thread] = best_index[0]
                for t in range(THREADS):
                    best_index[0] = T.Select(
                        bests[t] > best[0] or (bests[t] == best[0] and indices[t] < best_index[0]),
                        indices[t],
                        best_index[0],
                    )
                    best[0] = T.max(best[0], bests[t])
                if thread == 0:
                    index[0] = best_index[0]

    return argmax
