# SPDX-License-Identifier: Apache-2.0
"""The loops of `kernels` for GPUs: the same results from the same layouts, a thread per number.

A block of threads has one head of one token, and syncs only among its own threads. TVM schedules
what has operators; these say themselves which thread does what.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from tvm import tirx
from tvm.script import tirx as T  # noqa: N812

from tvm_ipc.errors import IPCError

#: Of a block.
THREADS: Final = 128
#: Bytes of memory that the threads of a block share, as every GPU has them.
SHARED: Final = 48 << 10
#: The longest context whose scores a block has room for, beside what its threads add up.
LONGEST: Final = SHARED // 4 - 2 * THREADS

_LOWEST: Final = -1e30
_FULL: Final = "the KV cache is full: the sequence is longer than the context of the model"


@cache
def rotate_and_append(
    heads: int, kv_heads: int, dim: int, context: int, dtype: str
) -> tirx.PrimFunc:
    """Rotate queries and keys by their position; put keys and values at the cache's end."""
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
    """Attention of the last n of `total` tokens to all tokens up to themselves.

    Rows after theirs get zeros.
    """
    if context > LONGEST:
        raise IPCError(
            f"the context is {context}, and the demo's attention for GPUs has room for the scores "
            f"of {LONGEST} positions; take a shorter --context"
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
        parts = T.sblock_alloc_buffer((THREADS,), "float32", scope="shared")
        sums = T.sblock_alloc_buffer((THREADS,), "float32", scope="shared")
        best = T.sblock_alloc_buffer((1,), "float32", scope="local")
        whole = T.sblock_alloc_buffer((1,), "float32", scope="local")
        for block in T.thread_binding(rows * heads, thread="blockIdx.x"):
            for thread in T.thread_binding(THREADS, thread="threadIdx.x"):
                # Of a row after the last token's a block computes what nobody uses.
                h = block % heads
                row = block // heads
                i = T.min(row, n - 1)
                last = total - n + i
                best[0] = T.float32(_LOWEST)
                for step in range(last // THREADS + 1):
                    whole[0] = T.float32(0)
                    for d in range(dim):
                        whole[0] = whole[0] + T.Cast("float32", queries[i, h, d]) * T.Cast(
                            "float32",
                            keys[h // group, d, T.min(step * THREADS + thread, last)],
                        )
                    scores[step * THREADS + thread] = T.Select(
                        step * THREADS + thread <= last,
                        whole[0] * T.float32(scale),
                        T.float32(_LOWEST),
                    )
                    best[0] = T.max(best[0], scores[step * THREADS + thread])
                parts[thread] = best[0]
                for other in range(THREADS):
                    best[0] = T.max(best[0], parts[other])
                whole[0] = T.float32(0)
                for step in range(last // THREADS + 1):
                    scores[step * THREADS + thread] = T.exp(
                        scores[step * THREADS + thread] - best[0]
                    )
                    whole[0] = whole[0] + scores[step * THREADS + thread]
                sums[thread] = whole[0]
                whole[0] = T.float32(0)
                for other in range(THREADS):
                    whole[0] = whole[0] + sums[other]
                for step in range((dim + THREADS - 1) // THREADS):
                    if step * THREADS + thread < dim:
                        best[0] = T.float32(0)
                        for j in range(last + 1):
                            best[0] = best[0] + scores[j] * T.Cast(
                                "float32", values[h // group, j, step * THREADS + thread]
                            )
                        result[row, h * dim + step * THREADS + thread] = T.Cast(
                            dtype, T.Select(row < n, best[0] / whole[0], T.float32(0))
                        )

    return attend


@cache
def argmax(length: int) -> tirx.PrimFunc:
    """The place of the largest number; the first one if there are several."""

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def argmax(x_handle: T.handle, place_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        x = T.match_buffer(x_handle, (length,), "float32")
        place = T.match_buffer(place_handle, (1,), "int32")
        bests = T.sblock_alloc_buffer((THREADS,), "float32", scope="shared")
        places = T.sblock_alloc_buffer((THREADS,), "int32", scope="shared")
        best = T.sblock_alloc_buffer((1,), "float32", scope="local")
        where = T.sblock_alloc_buffer((1,), "int32", scope="local")
        for _block in T.thread_binding(1, thread="blockIdx.x"):
            for thread in T.thread_binding(THREADS, thread="threadIdx.x"):
                best[0] = T.float32(_LOWEST)
                where[0] = 0
                for step in range((length + THREADS - 1) // THREADS):
                    if step * THREADS + thread < length:  # noqa: SIM102 - no load beyond the end
                        if x[step * THREADS + thread] > best[0]:
                            best[0] = x[step * THREADS + thread]
                            where[0] = T.Cast("int32", step * THREADS + thread)
                bests[thread] = best[0]
                places[thread] = where[0]
                for other in range(THREADS):
                    where[0] = T.Select(
                        bests[other] > best[0]
                        or (bests[other] == best[0] and places[other] < where[0]),
                        places[other],
                        where[0],
                    )
                    best[0] = T.max(best[0], bests[other])
                if thread == 0:
                    place[0] = where[0]

    return argmax
