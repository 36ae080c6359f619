# SPDX-License-Identifier: Apache-2.0
"""Matmuls of many rows in kernels that pack blocks of both operands: values, and order of sums."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import tvm_ffi

from tests.cpu.blas_programs import assert_same_bits_for_any_threads, random
from tests.cpu.test_openblas import KERNELS, call, kernels, near, wide  # noqa: F401
from tvm_ipc.packed_functions import Epilogue

_use_kernels = tvm_ffi.get_global_func("tvm_ipc.blas.use_kernels")
#: Those that have packed kernels.
PACKED = [name for name in KERNELS if name != "portable"]
#: m, k, n around the edges of tiles (14 or 6 rows), panels (32 or 16 columns), blocks of 256 steps
#: of k and of 512 rows; few rows of few steps of k, for which packing is faster than dot products.
SHAPES = [
    *[(13, 16, 32), (14, 17, 31), (15, 31, 33), (28, 64, 16), (29, 65, 17), (32, 255, 48)],
    *[(33, 256, 64), (43, 257, 65), (57, 512, 15), (100, 513, 1), (6, 40, 50), (12, 1, 47)],
    *[(511, 20, 33), (513, 300, 40), (1030, 30, 35), (64, 1000, 129)],
]


def stored(matrix: Any, turned: bool) -> tuple[Any, tuple[int, ...]]:
    """Return an operand that is stored in either order, and the axes that undo this."""
    return (np.ascontiguousarray(matrix.T), (1, 0)) if turned else (matrix, ())


def multiply(a: Any, b: Any, *operands: Any, turned: int, **options: Any) -> Any:
    """Multiply with a transposed in memory if `turned` has bit 0, and b if it has bit 1."""
    (own_a, a_axes), (own_b, b_axes) = stored(a, bool(turned & 1)), stored(b, bool(turned & 2))
    out = (a.shape[0], b.shape[1])
    return call(own_a, own_b, *operands, out=out, a_axes=a_axes, b_axes=b_axes, **options)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_edges_of_blocks(dtype: str, kernels: str) -> None:  # noqa: F811
    for m, k, n in SHAPES:
        a, b = random((m, k), dtype), random((k, n), dtype, 1)
        expected = wide(a) @ wide(b)
        for turned in range(4):
            near(multiply(a, b, turned=turned), expected, dtype, k)


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
def test_epilogues(out_dtype: str, kernels: str) -> None:  # noqa: F811
    steps = (Epilogue.ADD, Epilogue.RELU, Epilogue.MULTIPLY)
    for m, k, n in [(33, 40, 70), (90, 300, 45), (530, 260, 32)]:
        a, b = random((m, k), "float32"), random((k, n), "float32", 1)
        bias, scale = random((n,), "float32", 2), random((m, n), "float32", 3)
        expected = np.maximum(wide(a) @ wide(b) + bias, 0) * scale
        for turned in range(4):
            options: dict[str, Any] = {"steps": steps, "out_dtype": out_dtype}
            found = multiply(a, b, bias, scale, turned=turned, **options)
            near(found, expected, out_dtype, k)


def test_error_of_long_sums(kernels: str) -> None:  # noqa: F811
    depth = 100_000
    a, b = random((40, depth), "float32"), random((depth, 33), "float32", 1)
    found = multiply(a, b, turned=2)
    assert np.abs(found - wide(a) @ wide(b)).max() / np.sqrt(depth) < 5e-6


@pytest.mark.parametrize("turned", range(4))
def test_infinity_and_nan_spread_as_in_ieee_754(turned: int, kernels: str) -> None:  # noqa: F811
    for m, k, n in [(33, 40, 33), (70, 300, 50)]:
        a, b = np.ones((m, k), "float32"), np.ones((k, n), "float32")
        a[0, 3], a[31, k - 1], b[5, 7], b[k - 1, n - 1] = np.inf, -np.inf, np.nan, np.inf
        b[3, 9] = 0  # by which infinity is no number
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(multiply(a, b, turned=turned), a @ b)


# ---- order of sums --------------------------------------------------------------------------


def pick(name: str, work: Callable[[], Any]) -> Any:
    _use_kernels(name)
    try:
        return work()
    finally:
        _use_kernels("auto")


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bits_depend_on_no_other_row_or_column(name: str, dtype: str) -> None:
    m, k, n = 600, 700, 130
    a, b = random((m, k), dtype), random((k, n), dtype, 1)
    whole = {
        turned: pick(name, lambda turned=turned: multiply(a, b, turned=turned)) for turned in (0, 2)
    }
    # Weights contiguous along n: any number of rows. Along k, few rows have another order.
    for turned, rows in [*product((0,), (1, 3, 5, 9, 31, 33, 100)), *product((2,), (32, 47, 513))]:
        found = pick(name, lambda rows=rows, turned=turned: multiply(a[:rows], b, turned=turned))
        np.testing.assert_array_equal(found, whole[turned][:rows], f"{rows} rows, {turned}")
    # A column by itself is the row of a matmul of its own.
    for turned, (begin, end) in product((0, 2), ((0, 2), (3, 40), (64, 128), (97, 130))):
        part = np.ascontiguousarray(b[:, begin:end])
        found = pick(name, lambda part=part, turned=turned: multiply(a, part, turned=turned))
        np.testing.assert_array_equal(found, whole[turned][:, begin:end], f"{begin} to {end}")
    np.testing.assert_array_equal(whole[0], whole[2], "the order of memory")


@pytest.mark.parametrize("name", PACKED)
def test_bits_of_few_rows_depend_on_no_other_row_or_column(name: str) -> None:
    k, n = 600, 70
    a, b = random((31, k), "float32"), random((k, n), "float32", 1)
    rows = pick(name, lambda: [multiply(a[: i + 1], b, turned=2)[0] for i in (0, 1, 4, 11)])
    for row in rows[1:]:
        np.testing.assert_array_equal(row, rows[0])
    part = pick(name, lambda: multiply(a[:2], np.ascontiguousarray(b[:, 5:40]), turned=2))
    np.testing.assert_array_equal(part[0], rows[0][5:40])


def test_bits_are_those_of_every_instruction_set() -> None:
    a, b = random((40, 700), "float32"), random((700, 50), "float32", 1)
    results = [pick(name, lambda: multiply(a, b, turned=2)) for name in PACKED]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.skipif(not PACKED, reason="this machine has no packed kernels")
def test_bits_are_those_of_any_number_of_threads(run_python: Callable[..., str]) -> None:
    sizes = [(130, 300, 700), (700, 400, 130), (1030, 530, 77), (33, 3000, 300), (8, 900, 2100)]
    assert_same_bits_for_any_threads(run_python, 0, [*sizes, (48, 9000, 40)])
