# SPDX-License-Identifier: Apache-2.0
"""TIR kernels for CPUs: rotary embedding with KV cache, attention, argmax, SiLU.

The kernels work on the heads of one worker. Keys are cached by column and values by row, so that
the inner loops of attention read contiguous memory. All sums are float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from tvm import tirx
from tvm.script import tirx as T  # noqa: N812

#: Number of positions whose scores are computed together: several independent vectors.
LANES: Final = 64

#: Coefficients of a polynomial for e**r, the highest power first.
_EXP: Final = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
    1.0,
    1.0,
)
_LOWEST: Final = -1e30
_FULL: Final = "the KV cache is full: the sequence is longer than the context of the model"


@cache
def rotate_and_append(
    heads: int, kv_heads: int, dim: int, context: int, dtype: str
) -> tirx.PrimFunc:
    """Return a kernel that rotates queries and keys, and appends keys and values to the cache.

    A row of `qkv` has the queries, keys and values of one token; rows after the n tokens are
    padding. The first half of a row of `angles` has cosines, the second half sines. `total` is the
    length of the sequence including the n tokens.
    """
    half = dim // 2
    k_begin, v_begin = heads * dim, (heads + kv_heads) * dim
    width = (heads + 2 * kv_heads) * dim

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
        T.func_attr({"tirx.noalias": True})
        rows = T.int64()
        qkv = T.match_buffer(qkv_handle, (rows, width), dtype)
        angles = T.match_buffer(angles_handle, (context, dim), "float32")
        keys = T.match_buffer(keys_handle, (kv_heads, dim, context), dtype)
        values = T.match_buffer(values_handle, (kv_heads, context, dim), dtype)
        queries = T.match_buffer(queries_handle, (rows, heads, dim), dtype)
        assert total <= context, _FULL
        for i in range(n):
            for h in range(heads):
                for d in T.vectorized(half):
                    queries[i, h, d] = T.Cast(
                        dtype,
                        T.Cast("float32", qkv[i, h * dim + d]) * angles[total - n + i, d]
                        - T.Cast("float32", qkv[i, h * dim + half + d])
                        * angles[total - n + i, half + d],
                    )
                for d in T.vectorized(half):
                    queries[i, h, half + d] = T.Cast(
                        dtype,
                        T.Cast("float32", qkv[i, h * dim + half + d]) * angles[total - n + i, d]
                        + T.Cast("float32", qkv[i, h * dim + d]) * angles[total - n + i, half + d],
                    )
            for g in range(kv_heads):
                for d in T.vectorized(dim):
                    values[g, total - n + i, d] = qkv[i, v_begin + g * dim + d]
        for g, d, i in T.grid(kv_heads, half, n):
            keys[g, d, total - n + i] = T.Cast(
                dtype,
                T.Cast("float32", qkv[i, k_begin + g * dim + d]) * angles[total - n + i, d]
                - T.Cast("float32", qkv[i, k_begin + g * dim + half + d])
                * angles[total - n + i, half + d],
            )
            keys[g, half + d, total - n + i] = T.Cast(
                dtype,
                T.Cast("float32", qkv[i, k_begin + g * dim + half + d]) * angles[total - n + i, d]
                + T.Cast("float32", qkv[i, k_begin + g * dim + d])
                * angles[total - n + i, half + d],
            )

    return rotate_and_append


@cache
def attend(heads: int, kv_heads: int, dim: int, context: int, dtype: str) -> tirx.PrimFunc:
    """Return a kernel for causal attention of the last n of `total` tokens.

    Rows of padding become zeros.
    """
    group = heads // kv_heads
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
        queries = T.match_buffer(queries_handle, (rows, heads, dim), dtype)
        keys = T.match_buffer(keys_handle, (kv_heads, dim, context), dtype)
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
                for d in range(dim):
                    for j in T.vectorized(LANES):
                        sums[j] = sums[j] + T.Cast("float32", queries[i, h, d]) * T.Cast(
                            "float32", keys[h // group, d, block * LANES + j]
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
def argmax(length: int) -> tirx.PrimFunc:
    """Return a kernel for the index of the first maximum."""

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def argmax(x_handle: T.handle, index_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True})
        x = T.match_buffer(x_handle, (length,), "float32")
        index = T.match_buffer(index_handle, (1,), "int32")
        best = T.sblock_alloc_buffer((1,), "float32")
        best[0] = x[0]
        index[0] = 0
        for j in range(1, length):
            if x[j] > best[0]:
                best[0] = x[j]
                index[0] = T.Cast("int32", j)

    return argmax


def exp(x: Any) -> Any:
    """Return e**x of a float32 within one unit in the last place, in vectorizable operations.

    TVM's own `exp` calls the C library for each element.
    """
    x = tirx.max(tirx.min(x, _float(88)), _float(-87))
    # e**x = 2**n * e**r, and e**r for |r| < ln(2)/2 is a polynomial.
    n = tirx.floor(x * _float(1.4426950408889634) + _float(0.5))
    r = x - n * _float(0.693359375) + n * _float(2.12194440e-4)
    power = _float(_EXP[0])
    for coefficient in _EXP[1:]:
        power = power * r + _float(coefficient)
    return power * tirx.reinterpret("float32", (n.astype("int32") + 127) << 23)


def _float(value: float) -> Any:
    return tirx.const(value, "float32")


def silu_times(gate_and_up: Any) -> Any:
    """Return `silu(gate) * up` for rows with the gates in front of the ups."""
    from tvm import te

    rows, width = gate_and_up.shape
    half = int(width) // 2

    def value(i: Any, j: Any) -> Any:
        gate = gate_and_up[i, j].astype("float32")
        up = gate_and_up[i, half + j].astype("float32")
        return (gate / (1 + exp(-gate)) * up).astype(gate_and_up.dtype)

    return te.compute((rows, half), value, name="silu_times")
