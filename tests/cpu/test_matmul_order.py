# SPDX-License-Identifier: Apache-2.0
"""Matmuls whose sums have a fixed order: the same bits for any rows, columns, threads and workers.

`tests/native/test_matmul_order.cc` compares the kernels with loops in that order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 in NumPy
import numpy as np
import pytest

from tests.cpu.blas_programs import assert_same_bits_for_any_threads, random
from tests.cpu.test_openblas import KERNELS, call, kernels, near, wide  # noqa: F401
from tests.cpu.test_packed_matmul import PACKED, multiply, pick
from tvm_ipc.packed_functions import Epilogue

DTYPES = ("float32", "float16", "bfloat16")


def tree(sums: list[Any]) -> Any:
    """Add float32 arrays as a balanced binary tree."""
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def in_parts(a: Any, b: Any, parts: int, turned: int, **options: Any) -> Any:
    return multiply(a, b, turned=turned, parts=parts, **{"out_dtype": "float32", **options})


def in_lanes(products: Any) -> Any:
    """Add float32 products along the first axis in four lanes, and these as a tree.

    Each lane has two neighbours of a group of eight.
    """
    rest = -len(products) % 8
    products = np.concatenate([products, np.zeros((rest, *products.shape[1:]), "float32")])
    lanes = np.zeros((4, *products.shape[1:]), "float32")
    for step in range(0, len(products), 8):
        lanes = lanes + products[step : step + 8 : 2] + products[step + 1 : step + 8 : 2]
    return tree([lanes[lane] for lane in (0, 2, 1, 3)])


@pytest.mark.parametrize("name", PACKED)
def test_bits_are_those_of_numpy(name: str) -> None:
    """Products of bfloat16 are exact in float32, so that NumPy needs no fused multiply-add."""
    for m, k, n, parts in [(1, 5, 9, 1), (3, 296, 21, 8), (7, 1040, 10, 16), (40, 96, 34, 4)]:
        a, b = random((m, k), "bfloat16"), random((k, n), "bfloat16", 1)
        products = wide(a).astype("float32").T[:, :, None] * wide(b).astype("float32")[:, None]
        expected = tree([in_lanes(part) for part in np.split(products, parts)])
        for turned in range(4):
            found = pick(name, partial(in_parts, a, b, parts, turned))
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_workers_that_split_k(name: str, dtype: str) -> None:
    for m, k, n, parts in [(1, 1024, 70, 16), (5, 1040, 33, 16), (40, 4352, 50, 16)]:
        a, b = random((m, k), dtype), random((k, n), dtype, 1)

        def whole_and_split(turned: int, a: Any = a, b: Any = b, parts: int = parts) -> None:
            whole = in_parts(a, b, parts, turned)
            near(whole, wide(a) @ wide(b), "float32", a.shape[1])
            for workers in (2, 4, 8, 16):
                shares = zip(np.split(a, workers, 1), np.split(b, workers), strict=True)
                own = parts // workers
                sums = [in_parts(*share, own, turned) for share in shares]
                np.testing.assert_array_equal(tree(sums), whole, f"{workers} workers")

        for turned in range(4):
            pick(name, partial(whole_and_split, turned))


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_no_other_row_and_no_layout(name: str, dtype: str) -> None:
    k, n, parts = 1152, 45, 8
    a, b = random((129, k), dtype), random((k, n), dtype, 1)
    whole = pick(name, lambda: in_parts(a, b, parts, 0))
    for rows in (*range(1, 41), 64, 129):
        for turned in (0, 2) if rows % 8 else range(4):
            part = pick(name, partial(in_parts, a[:rows], b, parts, turned))
            np.testing.assert_array_equal(part, whole[:rows], f"{rows} rows, {turned}")
    for begin, end in ((0, 1), (1, 45), (7, 24), (3, 36)):
        part = np.ascontiguousarray(b[:, begin:end])
        for turned, rows in ((0, 1), (2, 1), (2, 7), (0, 129), (2, 129)):
            found = pick(name, partial(in_parts, a[:rows], part, parts, turned))
            np.testing.assert_array_equal(found, whole[:rows, begin:end], f"{begin} to {end}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_every_instruction_set(dtype: str) -> None:
    a, b = random((40, 768), dtype), random((768, 50), dtype, 1)
    for rows in (1, 5, 40):
        results = [pick(name, partial(in_parts, a[:rows], b, 4, 2)).tobytes() for name in PACKED]
        assert len(set(results)) <= 1


@pytest.mark.parametrize("name", PACKED)
def test_bits_differ_from_those_of_other_parts(name: str) -> None:
    """Or the other tests would prove nothing."""
    a, b = random((3, 1024), "float32"), random((1024, 200), "float32", 1)
    results = [pick(name, partial(in_parts, a, b, p, 2)).tobytes() for p in (1, 2, 8, 64)]
    assert len(set(results)) == len(results)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_steps_come_after_the_tree(name: str, out_dtype: str) -> None:
    steps = (Epilogue.ADD, Epilogue.RELU, Epilogue.MULTIPLY)
    # With many columns, steps are applied to some of them at a time.
    for m, k, n in [(1, 256, 70), (7, 256, 33), (8, 16, 33000), (40, 256, 70)]:
        a, b = random((m, k), "bfloat16"), random((k, n), "bfloat16", 1)
        bias, scale = random((n,), "float32", 2), random((m, n), "float32", 3)
        for turned in (0, 2):
            sums = pick(name, partial(in_parts, a, b, 4, turned))
            expected = (np.maximum(sums + bias, np.float32(0)) * scale).astype(out_dtype)
            options: dict[str, Any] = {"steps": steps, "out_dtype": out_dtype, "parts": 4}
            found = pick(name, partial(multiply, a, b, bias, scale, turned=turned, **options))
            np.testing.assert_array_equal(found, expected)


def test_batches(kernels: str) -> None:  # noqa: F811
    if kernels not in PACKED:
        pytest.skip("needs kernels whose order is fixed")
    a, b = random((3, 4, 64), "float32"), random((3, 64, 40), "float32", 1)
    found = call(a, b, out=(3, 4, 40), parts=4)
    for index in range(3):
        np.testing.assert_array_equal(found[index], in_parts(a[index], b[index], 4, 0))
    empty = call(a[:, :, :0], b[:, :0], out=(3, 4, 40), parts=4)
    np.testing.assert_array_equal(empty, np.zeros((3, 4, 40), "float32"))


@pytest.mark.skipif(not PACKED, reason="this machine has no packed kernels")
def test_bits_are_those_of_any_number_of_threads(run_python: Callable[..., str]) -> None:
    sizes = [(1, 1024, 3000), (8, 2048, 1100), (130, 512, 700), (700, 1024, 130), (33, 3072, 300)]
    assert_same_bits_for_any_threads(run_python, 8, sizes)


def test_refusals() -> None:
    x = np.ones((6, 12), "float32")

    def attempt(parts: int, x: Any = x) -> Callable[[], Any]:
        return lambda: call(x, x, out=(6, 6), b_axes=(1, 0), parts=parts)

    name = PACKED[0] if PACKED else "portable"
    cases = [
        (3, x, "parts is 3; expected a power of two, or 0"),
        (-4, x, "parts is -4; expected a power of two, or 0"),
        (8, x, "parts is 8, but a row of a has 12 elements; expected a divisor"),
        (4, x.astype("float64"), "parts is 4, but a and b are float64; expected float16, bfloat16"),
    ]
    for parts, operand, message in cases:
        with pytest.raises(ValueError, match=message):
            pick(name, attempt(parts, operand))
    with pytest.raises(ValueError, match=r"the kernels in use are portable; .* AVX2 or AVX-512"):
        pick("portable", attempt(4))
    assert (pick("portable", attempt(0)) == 12).all()
