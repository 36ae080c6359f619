# SPDX-License-Identifier: Apache-2.0
"""Products in modules: making them, offloading them, running them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes  # noqa: F401  makes bfloat16 known to NumPy
import numpy as np
import tvm
from tvm import relax

from tests.one_function_modules import one_function
from tvm_ipc.analysis.views_and_writes_of_calls import operator_of
from tvm_ipc.analysis.walk_and_rewrite_bindings import calls as calls_of
from tvm_ipc.cpu import OffloadBLAS

FUNCTION = "tvm_ipc.blas.matmul"
#: Sizes that modules do not know, and what they are when the modules run.
SIZES = {"n": 6, "m": 7, "b": 2}


def calls(mod: Any) -> list[tuple[int, ...]]:
    """The numbers of each call of the BLAS: axes of a and of b, steps."""
    found = []
    for function in mod.functions.values():
        for call in calls_of(function) if isinstance(function, relax.Function) else ():
            if operator_of(call) == "relax.call_dps_packed":
                assert str(call.args[0].global_symbol) == FUNCTION
                found.append(tuple(int(x.value) for x in call.args[1].fields[:3]))
    return found


def operators(mod: Any) -> list[str]:
    """Names of the operators that are left."""
    functions = [one for one in mod.functions.values() if isinstance(one, relax.Function)]
    names = {operator_of(call) for function in functions for call in calls_of(function)}
    return sorted(names - {"", "relax.call_dps_packed"})


def offload(mod: Any, min_work: int | None = 0) -> Any:
    before = mod.script()
    result = OffloadBLAS(min_work)(mod)
    assert mod.script() == before, "the module that is given stays as it was"
    relax.analysis.well_formed(result)
    return result


def random(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def randoms(*shapes: tuple[int, ...], dtype: str = "float32") -> list[Any]:
    """Other numbers in each array."""
    return [random(shape, dtype, seed) for seed, shape in enumerate(shapes)]


def run(mod: Any, arguments: list[Any], pipeline: Any = "default") -> Any:
    executable = tvm.compile(mod, "llvm", relax_pipeline=pipeline)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(x) for x in arguments])
    return result.numpy().astype("float64")


def same_as_tvm(mod: Any, arguments: list[Any], tolerance: float = 1e-4) -> None:
    """The pipeline with and without the BLAS gives the same."""
    found = run(offload(mod), arguments)
    expected = run(mod, arguments)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def built(shapes: list[tuple[Any, ...]], dtype: str, body: Callable[..., Any]) -> Any:
    """A module whose main has tensors of these shapes, named sizes being symbolic."""
    sizes: dict[Any, Any] = {d: tvm.tirx.Var(d, "int64") for s in shapes for d in s if d in SIZES}
    params = {f"x{k}": [sizes.get(d, d) for d in shape] for k, shape in enumerate(shapes)}
    return one_function(body, params, dtype=dtype)


def product(*shapes: tuple[Any, ...], dtype: str = "float32") -> Any:
    """A module of one product and nothing else."""
    return built([*shapes], dtype, lambda _, x, w: op.matmul(x, w))


op = relax.op
CASES: dict[str, tuple[list[tuple[Any, ...]], Callable[..., Any], list[tuple[int, ...]]]] = {
    "plain": ([("n", 24), (24, 16)], lambda e, x, w: op.matmul(x, w), [(0, 0, 0)]),
    "both transposed": (
        [(24, "n"), (16, 24)],
        lambda e, x, w: op.matmul(e(op.permute_dims(x)), e(op.permute_dims(w))),
        [(1, 1, 0)],
    ),
    "batch": ([("b", 5, 24), ("b", 24, 16)], lambda e, x, w: op.matmul(x, w), [(0, 0, 0)]),
    "broadcast batch": (
        [("b", 1, 5, 24), (3, 24, 16)],
        lambda e, x, w: op.matmul(x, w),
        [(0, 0, 0)],
    ),
    "attention": (
        [(2, "n", 3, 16), (2, "m", 3, 16)],
        lambda e, q, k: op.matmul(
            e(op.permute_dims(q, [0, 2, 1, 3])), e(op.permute_dims(k, [0, 2, -1, 1]))
        ),
        [(0x3120, 0x1320, 0)],
    ),
    "scaled": (
        [("n", 24), (24, 16)],
        lambda e, x, w: op.multiply(e(op.matmul(x, w)), relax.const(0.25, "float32")),
        [(0, 0, 2)],
    ),
    "gated": (
        [("n", 24), (24, 16), (24, 16)],
        lambda e, x, g, u: op.multiply(e(op.nn.silu(e(op.matmul(x, g)))), e(op.matmul(x, u))),
        [(0, 0, 0), (0, 0, 0x26)],
    ),
    "vector": ([(24,), (24, 16)], lambda e, x, w: op.matmul(x, w), [(0, 0, 0)]),
    "relu": ([("n", 24), (24, 16)], lambda e, x, w: op.nn.relu(e(op.matmul(x, w))), [(0, 0, 3)]),
    "gelu tanh": (
        [("n", 24), (24, 16)],
        lambda e, x, w: op.nn.gelu_tanh(e(op.matmul(x, w))),
        [(0, 0, 5)],
    ),
    "used twice": (
        [("n", 24), (24, 16)],
        lambda e, x, w: op.add(y := e(op.matmul(x, w)), e(op.nn.relu(y))),
        [(0, 0, 0)],
    ),
    "added to itself": (
        [("n", 24), (24, 16)],
        lambda e, x, w: op.add(y := e(op.matmul(x, w)), y),
        [(0, 0, 0)],
    ),
    "grows by broadcast": (
        [(1, 24), (24, 16), ("n", 16)],
        lambda e, x, w, y: op.add(e(op.matmul(x, w)), y),
        [(0, 0, 0)],
    ),
    "two products added": (
        [("n", 24), (24, 16), ("n", 24)],
        lambda e, x, w, y: op.add(e(op.matmul(x, w)), e(op.matmul(y, w))),
        [(0, 0, 0), (0, 0, 1)],
    ),
    "chain": (
        [("n", 24), (24, 24)],
        lambda e, x, w: op.matmul(e(op.nn.relu(e(op.matmul(x, w)))), w),
        [(0, 0, 3), (0, 0, 0)],
    ),
    "permutation used elsewhere": (
        [(24, 16), ("n", 16), (16, 24)],
        lambda e, w, x, y: op.add(
            e(op.matmul(x, wt := e(op.permute_dims(w)))), e(op.matmul(x, e(op.add(wt, y))))
        ),
        [(0, 1, 1), (0, 0, 0)],
    ),
}


def arguments(case: str) -> list[Any]:
    """Values for the parameters of a case."""
    shapes, _, _ = CASES[case]
    return randoms(*(tuple(SIZES.get(d, d) for d in shape) for shape in shapes))


_HASHES = """
import hashlib, numpy as np, tvm, tvm_ffi
import tvm_ipc.runtime; tvm_ipc.runtime.ready()
matmul = tvm_ffi.get_global_func("tvm_ipc.blas.matmul")
random, total = np.random.default_rng(0), hashlib.sha256()
tensor = lambda *shape: tvm.runtime.tensor(random.standard_normal(shape).astype("float32"))
for m, k, n in {sizes}:
    for axes, shape in ((0, (k, n)), (1, (n, k))):
        out = tvm.runtime.tensor(np.zeros((m, n), "float32"))
        matmul(0, axes, 0, {parts}, tensor(m, k), tensor(*shape), out)
        total.update(out.numpy().tobytes())
print(total.hexdigest())
"""


def assert_same_bits_for_any_threads(
    run_python: Callable[..., str], parts: int, sizes: Iterable[tuple[int, int, int]]
) -> None:
    """Compare float32 matmuls of sizes (m, k, n) on 1 to 4 threads."""
    program = _HASHES.format(sizes=list(sizes), parts=parts)
    hashes = {run_python(program, TVM_NUM_THREADS=str(threads)).strip() for threads in (1, 2, 3, 4)}
    assert len(hashes) == 1
    assert len(hashes.pop()) == 2 * hashlib.sha256().digest_size
