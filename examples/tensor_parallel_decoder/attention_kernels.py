# SPDX-License-Identifier: Apache-2.0
"""TIR kernels for attention with a KV cache, on the heads of one worker.

The pipeline schedules all of them but `attend`, which is written for CPUs and for GPUs, because it
computes the scores of one row at a time. Matmuls would store the scores of all rows.
Keys are cached by column and values by row, so that the inner loops of attention read contiguous
memory. All sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

from tvm import te, tirx
from tvm.script import tirx as T

from tvm_ipc.cpu.kernels.vector_math import exp  # unlike TVM's own `exp`, it is vectorized
from tvm_ipc.errors import IPCError

#: Number of positions whose scores are computed together on a CPU: several independent vectors.
LANES: Final = 64
#: Threads of a block on a GPU. A block processes one head of one token.
THREADS: Final = 128
#: The longest context whose scores fit into 48 KiB, the shared memory of a block on every GPU.
LONGEST: Final = (48 << 10) // 4 - 2 * THREADS

_LOWEST: Final = -1e30
_FULL: Final = "the KV cache is full: the sequence is longer than the context of the model"


def rotated(
    qkv: Any, angles: Any, row: Any, column: Any, half: Any, d: Any, position: Any
) -> tirx.Expr:
    """Return an element of a rotated head, in float32.

    Parameters
    ----------
    qkv : the queries, keys and values of each token.
    angles : the first half of a row has the cosines of a position, the second half the sines.
    row, column : the token, and the first column of the head.
    half, d : half of the head, 0 or 1, and the element of it.
    """
    width = angles.shape[1] // 2
    own = qkv[row, column + half * width + d].astype("float32")
    other = qkv[row, column + (1 - half) * width + d].astype("float32")
    sign = tirx.Select(half == 0, tirx.const(-1, "float32"), tirx.const(1, "float32"))
    return own * angles[position, d] + sign * other * angles[position, width + d]


def rotated_queries(qkv: Any, angles: Any, heads: int, first: Any) -> te.Tensor:
    """Return the queries, with heads split in halves; `first` is the position of the first row."""
    half = int(angles.shape[1]) // 2

    def value(i: Any, h: Any, s: Any, d: Any) -> Any:
        return rotated(qkv, angles, i, h * 2 * half, s, d, first + i).astype(qkv.dtype)

    return te.compute((qkv.shape[0], heads, 2, half), value, name="rotated_queries")


@cache
def append(heads: int, kv_heads: int, dim: int, context: int, dtype: str) -> tirx.PrimFunc:
    """Return a kernel that rotates keys, and appends keys and values to the caches.

    `n` is the number of tokens, and `total` the length of the sequence including them. Rows of
    `qkv` after the n tokens are padding.
    """
    half = dim // 2
    k_begin, v_begin = heads * dim, (heads + kv_heads) * dim
    width = (heads + 2 * kv_heads) * dim

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def append(
        qkv_handle: T.handle,
        angles_handle: T.handle,
        keys_handle: T.handle,
        values_handle: T.handle,
        n: T.int64,
        total: T.int64,
    ) -> None:
        T.func_attr({"tirx.noalias": True})
        rows = T.int64()
        qkv = T.match_buffer(qkv_handle, (rows, width), dtype)
        angles = T.match_buffer(angles_handle, (context, dim), "float32")
        keys = T.match_buffer(keys_handle, (kv_heads, 2, half, context), dtype)
        values = T.match_buffer(values_handle, (kv_heads, context, dim), dtype)
        assert total <= context, _FULL
        for i, g, s, d in T.grid(n, kv_heads, 2, half):
            with T.sblock("keys"):
                vi, vg, vs, vd = T.axis.remap("SSSS", [i, g, s, d])
                keys[vg, vs, vd, total - n + vi] = T.Cast(
                    dtype, rotated(qkv, angles, vi, k_begin + vg * dim, vs, vd, total - n + vi)
                )
        for i, g, d in T.grid(n, kv_heads, dim):
            with T.sblock("values"):
                vi, vg, vd = T.axis.remap("SSS", [i, g, d])
                values[vg, total - n + vi, vd] = qkv[vi, v_begin + vg * dim + vd]

    return append


def silu_times(gate_and_up: Any) -> te.Tensor:
    """Return `silu(gate) * up` for rows with the gates in front of the ups."""
    rows, width = gate_and_up.shape
    half = int(width) // 2

    def value(i: Any, j: Any) -> Any:
        gate = gate_and_up[i, j].astype("float32")
        up = gate_and_up[i, half + j].astype("float32")
        return (gate / (1 + te.exp(-gate)) * up).astype(gate_and_up.dtype)

    return te.compute((rows, half), value, name="silu_times")


@cache
def attend_on_cpu(heads: int, kv_heads: int, dim: int, context: int, dtype: str) -> tirx.PrimFunc:
    """Return a kernel for causal attention on CPUs, of the last n of `total` tokens.

    Rows of padding become zeros.
    """
    group, half = heads // kv_heads, dim // 2
    scale = dim**-0.5

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def attend(
        queries_handle: T.handle,
        keys_handle: T.handle,
        values_handle: T.handle,
        n: T.int64,
        total: T.int64,
        result_handle: T.handle,
    ) -> None:
        T.func_attr({"tirx.noalias": True})
        rows = T.int64()
        queries = T.match_buffer(queries_handle, (rows, heads, 2, half), dtype)
        keys = T.match_buffer(keys_handle, (kv_heads, 2, half, context), dtype)
        values = T.match_buffer(values_handle, (kv_heads, context, dim), dtype)
        result = T.match_buffer(result_handle, (rows, heads * dim), dtype)
        scores = T.sblock_alloc_buffer((context,), "float32")
        sums = T.sblock_alloc_buffer((LANES,), "float32")
        best = T.sblock_alloc_buffer((LANES,), "float32")
        mean = T.sblock_alloc_buffer((dim,), "float32")
        for h, i in T.grid(heads, n):
            for j in T.vectorized(LANES):
                best[j] = T.float32(_LOWEST)
            for block in range((total - n + i) // LANES + 1):
                for j in T.vectorized(LANES):
                    sums[j] = T.float32(0)
                for s, d in T.grid(2, half):
                    for j in T.vectorized(LANES):
                        sums[j] = sums[j] + T.Cast("float32", queries[i, h, s, d]) * T.Cast(
                            "float32", keys[h // group, s, d, block * LANES + j]
                        )
                for j in T.vectorized(LANES):
                    scores[block * LANES + j] = T.Select(
                        block * LANES + j <= total - n + i,
                        sums[j] * T.float32(scale),
                        T.float32(_LOWEST),
                    )
                    best[j] = T.max(best[j], scores[block * LANES + j])
            for j in range(1, LANES):
                best[0] = T.max(best[0], best[j])
            for j in T.vectorized(LANES):
                sums[j] = T.float32(0)
            for block in range((total - n + i) // LANES + 1):
                for j in T.vectorized(LANES):
                    scores[block * LANES + j] = exp(scores[block * LANES + j] - best[0])
                    sums[j] = sums[j] + scores[block * LANES + j]
            for j in range(1, LANES):
                sums[0] = sums[0] + sums[j]
            for d in T.vectorized(dim):
                mean[d] = T.float32(0)
            for j in range(total - n + i + 1):
                for d in T.vectorized(dim):
                    mean[d] = mean[d] + scores[j] * T.Cast("float32", values[h // group, j, d])
            for d in T.vectorized(dim):
                result[i, h * dim + d] = T.Cast(dtype, mean[d] / sums[0])
        for i, j in T.grid(rows - n, heads * dim):
            result[n + i, j] = T.Cast(dtype, T.float32(0))

    return attend


@cache
def attend_on_gpu(heads: int, kv_heads: int, dim: int, context: int, dtype: str) -> tirx.PrimFunc:
    """Return a kernel for causal attention on GPUs, of the last n of `total` tokens.

    Rows of padding become zeros.
    """
    if context > LONGEST:
        raise IPCError(
            f"the context is {context}, but the demo's attention kernel for GPUs supports at most "
            f"{LONGEST} positions; use a shorter --context"
        )
    group, half = heads // kv_heads, dim // 2
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
        queries = T.match_buffer(queries_handle, (rows, heads, 2, half), dtype)
        keys = T.match_buffer(keys_handle, (kv_heads, 2, half, context), dtype)
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
                    for s, d in T.grid(2, half):
                        acc[0] = acc[0] + T.Cast("float32", queries[i, h, s, d]) * T.Cast(
                            "float32",
                            keys[h // group, s, d, T.min(step * THREADS + thread, last)],
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


#: The attention kernels by device.
ATTEND: Final[dict[str, Callable[[int, int, int, int, str], tirx.PrimFunc]]] = {
    "cpu": attend_on_cpu,
    "cuda": attend_on_gpu,
}
