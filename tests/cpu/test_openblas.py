# SPDX-License-Identifier: Apache-2.0
"""Products of the BLAS and of the kernels beside it, against NumPy in float64."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_ipc
from tests.cpu.blas_programs import built, op, random
from tvm_ipc.packed_functions import MAX_STEPS, Epilogue, pack_digits

DTYPES = ("float32", "float64", "float16", "bfloat16")
TOLERANCE = {"float32": 1e-5, "float64": 1e-13, "float16": 3e-3, "bfloat16": 2e-2}
#: m, k, n: nothing, one, odd, few rows, many, more than a block of each kernel, one column.
SHAPES = [
    *[(0, 4, 4), (4, 4, 0), (3, 0, 4), (1, 1, 1), (1, 7, 5), (1, 77, 1), (33, 1, 1), (50, 40, 1)],
    *[(1, 600, 700), (2, 16, 33), (4, 100, 130), (3, 300, 500), (5, 65, 64), (8, 8, 8)],
    *[(7, 1000, 70), (9, 17, 3), (16, 33, 31), (520, 530, 515), (1100, 40, 20), (40, 64, 600)],
    # Many weights for rows that fit into a cache, and rows of two types that do not.
    *[(18, 700, 190), (99, 1500, 90), (215, 1300, 103)],
]
_matmul = tvm_ffi.get_global_func("tvm_ipc.blas.matmul")
_use_kernels = tvm_ffi.get_global_func("tvm_ipc.blas.use_kernels")
_info = tvm_ffi.get_global_func("tvm_ipc.blas.info")


def instruction_sets_here() -> list[str]:
    """Return the instruction sets of this machine that have different kernels."""
    names = {}
    for name in ("avx512bf16", "avx512", "avx2", "portable", "auto"):
        with contextlib.suppress(ValueError):
            _use_kernels(name)
            names.setdefault(json.loads(_info())["kernels"], name)
    _use_kernels("auto")
    return list(names.values())


KERNELS = instruction_sets_here()


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    _use_kernels(request.param)
    yield request.param
    _use_kernels("auto")


def call(
    a: Any,
    b: Any,
    *operands: Any,
    out: tuple[int, ...],
    a_axes: tuple[int, ...] = (),
    b_axes: tuple[int, ...] = (),
    steps: tuple[Epilogue, ...] = (),
    out_dtype: str | None = None,
    parts: int = 0,
) -> Any:
    """Multiply into memory that was full of NaN."""
    with np.errstate(invalid="ignore"):
        target = np.full(out, np.nan).astype(out_dtype or str(a.dtype))
    tensors = [tvm.runtime.tensor(x) for x in (a, b, *operands, target)]
    _matmul(pack_digits(a_axes), pack_digits(b_axes), pack_digits(steps), parts, *tensors)
    return tensors[-1].numpy()


def wide(x: Any) -> Any:
    return np.asarray(x).astype("float64")


def near(found: Any, expected: Any, dtype: str, depth: int) -> None:
    tolerance = TOLERANCE[dtype] * max(1, math.sqrt(depth))
    np.testing.assert_allclose(wide(found), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_and_transposes(dtype: str, kernels: str) -> None:
    for (m, k, n), a_turned, b_turned in product(SHAPES, (False, True), (False, True)):
        a, b = random((k, m) if a_turned else (m, k), dtype), random((k, n), dtype, 1)
        stored = np.ascontiguousarray(b.T) if b_turned else b
        axes = {"a_axes": (1, 0) if a_turned else (), "b_axes": (1, 0) if b_turned else ()}
        found = call(a, stored, out=(m, n), **axes)
        near(found, wide(a.T if a_turned else a) @ wide(b), dtype, k)


ACTIVATIONS: dict[Epilogue, Callable[[Any], Any]] = {
    Epilogue.RELU: lambda x: np.where(x > 0, x, 0),  # of NaN, too, as TVM's kernels have it
    Epilogue.GELU: lambda x: 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / 2**0.5)),
    Epilogue.GELU_TANH: lambda x: (
        0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
    ),
    Epilogue.SILU: lambda x: x / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps(dtype: str, activation: Epilogue, kernels: str) -> None:
    for m, k, n in [(1, 50, 33), (4, 64, 300), (7, 20, 1), (33, 70, 65), (600, 40, 300)]:
        a, b = random((m, k), dtype), random((k, n), dtype, 1)
        bias, residual = random((n,), dtype, 2), random((m, n), dtype, 3)
        steps = (Epilogue.ADD, activation, Epilogue.MULTIPLY, Epilogue.ADD)
        found = call(a, b, bias, residual, residual, out=(m, n), steps=steps)
        expected = ACTIVATIONS[activation](wide(a) @ wide(b) + wide(bias))
        expected = expected * wide(residual) + wide(residual)
        near(found, expected, dtype, 4 * k)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rounding_errors_of_long_sums_of_few_rows(dtype: str) -> None:
    depth = 200_000
    a, b = random((3, depth), dtype), random((depth, 33), dtype, 1)
    stored, expected = {(): b, (1, 0): np.ascontiguousarray(b.T)}, wide(a) @ wide(b)
    for kernels, (b_axes, weights), rows in product(KERNELS, stored.items(), (1, 3)):
        _use_kernels(kernels)
        found = call(a[:rows], weights, out=(rows, 33), b_axes=b_axes, out_dtype="float32")
        _use_kernels("auto")
        error = np.abs(found - expected[:rows]).max() / math.sqrt(depth)
        assert error < 3e-6, f"{kernels}, {rows} rows, axes {b_axes}"


@pytest.mark.skipif("avx512bf16" not in KERNELS, reason="needs AVX-512 with bfloat16")
@pytest.mark.parametrize("depth", [1000, 9001])
def test_rows_have_the_same_bits_beside_any_number_of_others(depth: int) -> None:
    # More rows than four are multiplied by panels of weights, in groups of five to eight.
    cols, most = 200, 300
    a, b = random((most, depth), "bfloat16"), random((cols, depth), "bfloat16", 1)
    _use_kernels("avx512bf16")
    try:
        single = [call(a[i : i + 1], b, out=(1, cols), b_axes=(1, 0)) for i in range(40)]
        expected = np.concatenate(single)
        near(expected, wide(a[:40]) @ wide(b).T, "bfloat16", depth)
        for rows in (*range(2, 20), 31, 33, 90, 250):
            found = call(a[:rows], b, out=(rows, cols), b_axes=(1, 0))
            count = min(rows, 40)
            np.testing.assert_array_equal(wide(found[:count]), wide(expected[:count]), f"{rows}")
    finally:
        _use_kernels("auto")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_steps_of_extreme_numbers(activation: Epilogue, kernels: str) -> None:
    x = np.array([[0, -0.0, 1e-30, -1e-30, 20, -20, 90, -90, 1e4, -1e4, np.inf, np.nan]], "float32")
    found = call(np.ones((1, 1), "float32"), x, out=x.shape, steps=(activation,))
    with np.errstate(all="ignore"):
        expected = ACTIVATIONS[activation](wide(x))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("operand", [(), (1,), (33,), (5, 33), (5, 1), (1, 33), (3, 1, 33)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_broadcast(dtype: str, operand: tuple[int, ...]) -> None:
    a, b, x = random((3, 5, 8), dtype), random((3, 8, 33), dtype, 1), random(operand, dtype, 2)
    found = call(a, b, x, out=(3, 5, 33), steps=(Epilogue.MULTIPLY,))
    near(found, wide(a) @ wide(b) * wide(x), dtype, 8)
    # The rows of the batch become rows of one matrix.
    found = call(a, b[0], x, out=(3, 5, 33), steps=(Epilogue.ADD,))
    near(found, wide(a) @ wide(b[0]) + wide(x), dtype, 8)


BATCHES = [
    *[((3, 4, 5), (3, 5, 6)), ((3, 4, 5), (5, 6)), ((4, 5), (3, 5, 6)), ((1, 4, 5), (3, 5, 6))],
    *[((3, 4, 5), (1, 5, 6)), ((2, 1, 4, 5), (3, 5, 6)), ((2, 3, 1, 5), (2, 3, 5, 6))],
    *[((2, 3, 1, 5), (5, 6)), ((2, 3, 4, 5), (2, 1, 5, 6)), ((0, 4, 5), (0, 5, 6))],
    *[((2, 0, 4, 5), (5, 6)), ((5,), (5, 6)), ((4, 5), (5,)), ((5,), (5,)), ((3, 4, 5), (5,))],
    *[((5,), (3, 5, 6)), ((2, 300, 40), (2, 40, 300))],
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("a_shape", "b_shape"), BATCHES)
def test_batches(a_shape: tuple[int, ...], b_shape: tuple[int, ...], dtype: str) -> None:
    a, b = random(a_shape, dtype), random(b_shape, dtype, 1)
    expected = wide(a) @ wide(b)
    near(call(a, b, out=expected.shape), expected, dtype, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_heads_of_attention_are_read_in_place(tokens: int, dtype: str, kernels: str) -> None:
    # batch, tokens, heads, dim -> heads come before tokens, and keys are transposed
    q, k, v = (random((2, tokens, 3, 16), dtype, seed) for seed in range(3))
    scores = call(q, k, out=(2, 3, tokens, tokens), a_axes=(0, 2, 1, 3), b_axes=(0, 2, 3, 1))
    expected = wide(q).transpose(0, 2, 1, 3) @ wide(k).transpose(0, 2, 3, 1)
    near(scores, expected, dtype, 16)
    mixed = call(scores, v, out=(2, 3, tokens, 16), b_axes=(0, 2, 1, 3))
    near(mixed, wide(scores) @ wide(v).transpose(0, 2, 1, 3), dtype, tokens)


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("m", [1, 30])
def test_result_of_another_type(m: int, dtype: str, out_dtype: str, kernels: str) -> None:
    a, b = random((m, 60), dtype), random((60, 70), dtype, 1)
    found = call(a, b, out=(m, 70), out_dtype=out_dtype)
    assert found.dtype == out_dtype
    rough = max(dtype, out_dtype, key=TOLERANCE.__getitem__)
    near(found, wide(a) @ wide(b), rough, 60)


def test_sums_of_16_bits_are_float32() -> None:
    # In bfloat16 the sum would stay at 256.
    for m in (1, 9, 40):
        ones = np.ones((m, 4096), ml_dtypes.bfloat16)
        assert (call(ones, ones[:1].T.copy(), out=(m, 1), out_dtype="float32") == 4096).all()
        assert (call(ones, np.ones((4096, 40), ones.dtype), out=(m, 40)) == 4096).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 8, 40])
def test_infinity_and_nan(m: int, dtype: str, kernels: str) -> None:
    a, b = np.ones((m, 40), dtype), np.ones((40, 50), dtype)
    a[0, 3], b[5, 7], b[6, 9] = np.inf, np.nan, -np.inf
    found = wide(call(a, b, out=(m, 50)))
    with np.errstate(invalid="ignore"):
        expected = wide(a) @ wide(b)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))


# ---- threads --------------------------------------------------------------------------------

COUNT_THREADS = """
import os, json, numpy as np, tvm, tvm_ffi
count = lambda: len(os.listdir("/proc/self/task"))
import tvm_ipc.runtime; tvm_ipc.runtime.ready()
before, results = count(), []
matmul = tvm_ffi.get_global_func("tvm_ipc.blas.matmul")
random = np.random.default_rng(0)
for dtype in ("float32", "float64", "float16"):
    for shape in ((600, 500, 700), (1, 2000, 1500), (700, 2000, 64), (64, 2000, 700)):
        m, k, n = shape
        a, b = (tvm.runtime.tensor(random.random(s).astype(dtype)) for s in ((m, k), (k, n)))
        bias = tvm.runtime.tensor(random.random(n).astype(dtype))
        out = tvm.runtime.tensor(np.zeros((m, n), dtype))
        matmul(0, 0, 0x61, 0, a, b, bias, out)
        expected = a.numpy().astype("float64") @ b.numpy().astype("float64") + bias.numpy()
        expected /= 1 + np.exp(-expected)
        np.testing.assert_allclose(out.numpy(), expected, rtol=2e-3)
print(json.dumps([before, count()]))
"""


@pytest.mark.slow
def test_threads_are_those_of_tvm(run_python: Callable[..., str]) -> None:
    for threads in (1, 2, 3):
        variables = {"TVM_NUM_THREADS": str(threads), "OMP_NUM_THREADS": "1"}
        before, after = json.loads(run_python(COUNT_THREADS, **variables))
        # One of TVM's pool is the caller's own.
        assert before <= after <= before + threads - 1, threads


# ---- in workers -----------------------------------------------------------------------------


def test_workers_without_compiler(tmp_path: Path) -> None:
    mod = built(
        [("n", 96), (96, 80)],
        "float32",
        lambda e, x, w: op.ccl.allreduce(e(op.nn.relu(e(op.matmul(x, w)))), "sum"),
    )
    path = tmp_path / "program.so"
    pipeline = tvm_ipc.get_pipeline("llvm", 2, blas=True)
    executable = tvm.compile(mod, "llvm", relax_pipeline=pipeline)
    assert "tvm_ipc.blas.matmul" in executable.as_text()
    executable.export_library(str(path))
    with tvm_ipc.Session(2, timeout=60) as session:
        main = session.load_vm_module(str(path))["main"]
        weights = random((96, 80), "float32")
        for rows in (0, 1, 3, 17, 130):
            rows_of_x = random((rows, 96), "float32", 1)
            found = session.get(main(session.put(rows_of_x), session.put(weights)), rank=1)
            near(found, 2 * np.maximum(wide(rows_of_x) @ wide(weights), 0), "float32", 96)


MISSING = """
import tvm, tvm_ffi, numpy as np
import tvm_ipc.cpu.openblas_discovery, tvm_ipc.runtime; tvm_ipc.runtime.ready()
tvm_ipc.cpu.openblas_discovery._PACKAGE = "no_such_package"
x = tvm.runtime.tensor(np.zeros((2, 2), "float32"))
try:
    tvm_ffi.get_global_func("tvm_ipc.blas.matmul")(0, 0, 0, 0, x, x, x)
except tvm_ipc.errors.LibraryError as error:
    print(error)
assert not tvm_ipc.cpu.openblas_discovery.installed()
"""


@pytest.mark.parametrize("runtime_only", ["0", "1"])
def test_missing_library_says_what_to_install(
    runtime_only: str, run_python: Callable[..., str]
) -> None:
    message = run_python(MISSING, TVM_USE_RUNTIME_LIB=runtime_only)
    assert "OpenBLAS, which is not installed; run pip install scipy-openblas64" in message


# ---- what is refused ------------------------------------------------------------------------


def test_wrong_arguments() -> None:
    x, half = np.zeros((2, 3), "float32"), np.zeros((2, 3), "float16")
    turned = {"b_axes": (1, 0)}
    wrong = [
        (lambda: call(x, x, out=(2, 3)), r"a \(2, 3\), b \(2, 3\) and out \(2, 3\) do not fit"),
        (lambda: call(x, x, out=(2, 3), **turned), "do not fit"),
        (lambda: call(x, half, out=(2, 2), **turned), "different types"),
        (lambda: call(x, x, out=(2, 2), b_axes=(1, 5)), "has no axis 5"),
        (lambda: call(x, x, out=(2, 2), out_dtype="float64", **turned), "as float64 only"),
        (lambda: call(x, x, out=(2, 2), out_dtype="int32", **turned), "bfloat16, float32 and"),
        (lambda: call(x, x, out=(2, 2), steps=(Epilogue.ADD,), **turned), "lacks its operand"),
        (lambda: call(x, x, x, out=(2, 2), **turned), "1 operands are left over"),
        (lambda: call(x, x, x, out=(2, 2), steps=(1,), **turned), "does not broadcast"),
        (lambda: call(x, x, out=(2, 2), steps=(9,), **turned), "no step 9"),
        (lambda: call(x, x, out=(2, 2), steps=(3,) * (MAX_STEPS + 1), **turned), "at most 8"),
        (lambda: call(x[:, 0], x[None], out=(1, 3), b_axes=(2, 0, 1)), "do not fit"),
    ]
    for attempt, message in wrong:
        with pytest.raises(ValueError, match=message):
            attempt()
    cube = np.zeros((2, 3, 4), "float32")
    with pytest.raises(ValueError, match="no dimension of the matrix is contiguous"):
        call(cube, np.zeros((4, 3, 5), "float32"), out=(4, 2, 5), a_axes=(2, 0, 1))
    with pytest.raises(ValueError, match="is no tensor"):
        _matmul(0, 0, 0, 0, 1, 2, 3)
