# SPDX-License-Identifier: Apache-2.0
"""Programs that IPCAllReduceRewrite rewrote, in real workers, against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tvm_ipc.transform import collect_report

ORDINARY = "runtime.disco.allreduce"


@pytest.fixture(scope="module", params=[2, 3])
def session(request: pytest.FixtureRequest) -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(num_workers=request.param) as session:
        yield session


@pytest.fixture(scope="module")
def groups() -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(num_workers=4, num_groups=2) as session:
        yield session


def compiled(
    module: tvm.IRModule, workers: int, strategy: int = 3, num_groups: int = 1
) -> tuple[object, list[str]]:
    """The program, and what was decided of its all-reduces."""
    pipeline = tvm_ipc.get_pipeline("llvm", workers, strategy, num_groups=num_groups)
    with collect_report() as report:
        program = tvm.compile(module, target="llvm", relax_pipeline=pipeline)
    verdicts = [d.verdict for d in report.decisions if d.pass_name == "IPCAllReduceRewrite"]
    return program, verdicts


def run(session: tvm_ipc.Session, function, *inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Call a function; each input has an array for each rank. The result of every rank."""
    arguments = []
    for arrays in inputs:
        argument = session.empty(arrays[0].shape, str(arrays[0].dtype))
        for rank, array in enumerate(arrays):
            argument.debug_copy_from(rank, array)
        arguments.append(argument)
    result = function(*arguments)
    return [session.get(result, rank=rank) for rank in range(session.num_workers)]


@I.ir_module
class Inputs:
    """Every kind of input that an all-reduce can have."""

    @R.function
    def parameter(x: R.Tensor((5, "n"), "float32")):
        return R.ccl.allreduce(x, "sum", False)

    @R.function
    def constant(x: R.Tensor((5, 4), "float32")):
        y = R.ccl.allreduce(R.const([1.0, 2.0, 3.0, 4.0], "float32"), "sum", False)
        return R.add(x, y)

    @R.function
    def allocated(x: R.Tensor((5, "n"), "float32")):
        return R.ccl.allreduce(R.multiply(x, x), "sum", False)

    @R.function
    def reshaped(x: R.Tensor((5, 4), "float32")):
        y = R.reshape(R.multiply(x, x), (20,))
        z = R.ccl.allreduce(y, "sum", False)
        return R.reshape(z, (5, 4))

    @R.function
    def needed_later(x: R.Tensor((5, "n"), "float32")):
        y = R.multiply(x, x)
        z = R.ccl.allreduce(y, "sum", False)
        return R.add(y, z)

    @R.function
    def reduced_twice(x: R.Tensor((5, "n"), "float32")):
        y = R.multiply(x, x)
        a = R.ccl.allreduce(y, "sum", False)
        b = R.ccl.allreduce(y, "max", False)
        return R.add(a, R.add(b, y))

    @R.function
    def chained(x: R.Tensor((5, "n"), "float32")):
        a = R.ccl.allreduce(x, "sum", False)
        b = R.ccl.allreduce(a, "sum", False)
        c = R.ccl.allreduce(R.add(a, b), "sum", False)
        return c

    @R.function
    def branches(x: R.Tensor((5, 4), "float32"), c: R.Tensor((), "bool")):
        if c:
            y = R.multiply(x, x)
            z = y
        else:
            z = x
        w = R.ccl.allreduce(z, "sum", False)
        return R.add(w, z)

    @R.function
    def inside_a_branch(x: R.Tensor((5, 4), "float32"), c: R.Tensor((), "bool")):
        if c:
            y = R.ccl.allreduce(x, "sum", False)
            z = R.add(y, x)
        else:
            y = R.ccl.allreduce(R.multiply(x, x), "sum", False)
            z = y
        return z

    @R.function
    def fields(x: R.Tensor((5, "n"), "float32")):
        t = (x, (R.multiply(x, x), x))
        u = t[1]
        a = R.ccl.allreduce(u[0], "sum", False)
        b = R.ccl.allreduce(t[0], "sum", False)
        return R.subtract(a, b)

    @R.function
    def fields_of_a_parameter(t: R.Tuple(R.Tensor((5, 4), "float32"), R.Tensor((5, 4), "float32"))):
        a = R.ccl.allreduce(t[0], "sum", False)
        b = R.ccl.allreduce(t[1], "max", False)
        return R.subtract(a, b)

    @R.function(private=True)
    def square(x: R.Tensor((5, 4), "float32")) -> R.Tensor((5, 4), "float32"):
        y = R.multiply(x, x)
        return y

    @R.function
    def public_square(x: R.Tensor((5, 4), "float32")) -> R.Tensor((5, 4), "float32"):
        y = R.multiply(x, x)
        return y

    @R.function(private=True)
    def reduce(x: R.Tensor((5, 4), "float32")) -> R.Tensor((5, 4), "float32"):
        y = R.ccl.allreduce(x, "sum", False)
        return y

    @R.function
    def of_functions(x: R.Tensor((5, 4), "float32")):
        cls = Inputs
        a = cls.square(x)
        b = R.ccl.allreduce(a, "sum", False)
        c = cls.public_square(x)
        d = R.ccl.allreduce(c, "sum", False)
        e = cls.reduce(x)
        f = cls.reduce(R.add(a, x))
        return R.add(R.add(b, d), R.add(e, f))

    @R.function(private=True)
    def shrink(x: R.Tensor((5, 4), "float32")) -> R.Tensor((5, 4), "float32"):
        cls = Inputs
        total = R.ccl.allreduce(x, "sum", False)
        c = R.greater(R.max(total), R.const(1.0, "float32"))
        if c:
            half = R.multiply(x, R.const(0.5, "float32"))
            y: R.Tensor((5, 4), "float32") = cls.shrink(half)
        else:
            y: R.Tensor((5, 4), "float32") = total
        return y

    @R.function
    def recursion(x: R.Tensor((5, 4), "float32")):
        cls = Inputs
        y = cls.shrink(x)
        return y

    @R.function
    def in_the_group(x: R.Tensor((5, "n"), "float32")):
        return R.ccl.allreduce(R.multiply(x, x), "sum", True)

    @R.function
    def with_other_collectives(x: R.Tensor((6, 4), "float32")):
        y = R.ccl.broadcast_from_worker0(x)
        a = R.ccl.allreduce(y, "sum", False)
        return R.add(a, R.ccl.allreduce(x, "min", False))


def shrunk(xs: list[np.ndarray]) -> np.ndarray:
    total = sum(xs)
    return shrunk([x / 2 for x in xs]) if total.max() > 1 else total


EXPECTED: dict[str, Callable[[list[np.ndarray]], list[np.ndarray] | np.ndarray]] = {
    "parameter": lambda xs: sum(xs),
    "constant": lambda xs: [x + len(xs) * np.arange(1, 5, dtype="float32") for x in xs],
    "allocated": lambda xs: sum(x * x for x in xs),
    "reshaped": lambda xs: sum(x * x for x in xs),
    "needed_later": lambda xs: [x * x + sum(y * y for y in xs) for x in xs],
    "reduced_twice": lambda xs: [
        x * x + sum(y * y for y in xs) + np.max([y * y for y in xs], axis=0) for x in xs
    ],
    "chained": lambda xs: len(xs) * (1 + len(xs)) * sum(xs),
    "fields": lambda xs: sum(x * x for x in xs) - sum(xs),
    "of_functions": lambda xs: 3 * sum(x * x for x in xs) + 2 * sum(xs),
    "recursion": shrunk,
    "in_the_group": lambda xs: sum(x * x for x in xs),
}


def data(ranks: int, shape: tuple[int, ...] = (5, 4), dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(ranks)
    return [rng.uniform(0.5, 2, shape).astype(dtype) for _ in range(ranks)]


def check(results: list[np.ndarray], expected: list[np.ndarray] | np.ndarray) -> None:
    if not isinstance(expected, list):
        expected = [expected] * len(results)
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5)


@pytest.fixture(scope="module", params=[0, 1, 2, 3])
def inputs(session, request):
    program, verdicts = compiled(Inputs, session.num_workers, request.param)
    assert set(verdicts) == {"rewritten"}
    return session.load_vm_module(program)


@pytest.mark.parametrize("name", EXPECTED)
def test_input(session, inputs, name):
    xs = data(session.num_workers)
    for _ in range(3):  # memory of the first call is used again
        check(run(session, inputs[name], xs), EXPECTED[name](xs))


@pytest.mark.parametrize("taken", [True, False])
def test_input_is_the_result_of_an_if(session, inputs, taken):
    xs, cs = data(session.num_workers), [np.array(taken)] * session.num_workers
    zs = [x * x if taken else x for x in xs]
    check(run(session, inputs["branches"], xs, cs), [sum(zs) + z for z in zs])


@pytest.mark.parametrize("taken", [True, False])
def test_all_reduce_in_a_branch(session, inputs, taken):
    xs, cs = data(session.num_workers), [np.array(taken)] * session.num_workers
    expected = [sum(xs) + x for x in xs] if taken else sum(x * x for x in xs)
    check(run(session, inputs["inside_a_branch"], xs, cs), expected)


def test_between_other_collectives(session, inputs):
    xs = data(session.num_workers, (6, 4))
    expected = len(xs) * xs[0] + np.min(xs, axis=0)
    check(run(session, inputs["with_other_collectives"], xs), expected)


REDUCTIONS = {
    "sum": lambda xs: np.sum(xs, axis=0),
    "prod": lambda xs: np.prod(xs, axis=0),
    "min": lambda xs: np.min(xs, axis=0),
    "max": lambda xs: np.max(xs, axis=0),
    "avg": lambda xs: np.mean(xs, axis=0),
}


def reductions(dtype: str, in_group: bool) -> tvm.IRModule:
    """A function for each reduction of a parameter and of what was computed."""
    builder = relax.BlockBuilder()
    for kind in REDUCTIONS:
        x = relax.Var("x", relax.TensorType((3, 50), dtype))
        with builder.function(kind, [x], attrs={"global_symbol": kind}):
            y = builder.emit(relax.op.ccl.allreduce(x, kind, in_group))
            z = builder.emit(relax.op.ccl.allreduce(relax.op.add(x, y), kind, in_group))
            builder.emit_func_output(z)
    return builder.get()


def reduced(kind: str, xs: list[np.ndarray]) -> np.ndarray:
    wide = [x.astype("float64" if x.dtype.kind in "fV" else "int64") for x in xs]
    y = REDUCTIONS[kind](wide).astype(xs[0].dtype).astype(wide[0].dtype)
    z = [(x + y).astype(xs[0].dtype).astype(wide[0].dtype) for x in wide]
    return REDUCTIONS[kind](z).astype(xs[0].dtype).astype(wide[0].dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "uint8"])
def test_every_reduction(session, dtype):
    program, verdicts = compiled(reductions(dtype, False), session.num_workers)
    assert verdicts == ["rewritten"] * 10
    functions = session.load_vm_module(program)
    kind_of = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    rng = np.random.default_rng(1)
    xs = [rng.integers(1, 4, (3, 50)).astype(kind_of) for _ in range(session.num_workers)]
    for kind in REDUCTIONS:
        if kind == "avg" and dtype in ("int32", "uint8"):
            continue  # how it rounds is for the tests of the runtime
        results = run(session, functions[kind], xs)
        for result in results:
            wanted = reduced(kind, xs)
            rtol = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-5)
            np.testing.assert_allclose(result.astype("float64"), wanted, rtol=rtol)


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@pytest.mark.parametrize("in_group", [True, False])
def test_groups(groups, strategy, in_group):
    module = reductions("float32", in_group)
    program, verdicts = compiled(module, 4, strategy, num_groups=2)
    assert verdicts == ["rewritten"] * 10
    functions = groups.load_vm_module(program)
    xs = data(4, (3, 50))
    for kind in REDUCTIONS:
        results = run(groups, functions[kind], xs)
        for rank, result in enumerate(results):
            peers = xs[rank // 2 * 2 :][:2] if in_group else xs
            np.testing.assert_allclose(result, reduced(kind, peers), rtol=1e-4)


@pytest.mark.parametrize("taken", [False, True])
def test_a_constant_that_is_first_seen_late(session, taken):
    source = """
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")):
        y = R.ccl.allreduce(R.multiply(x, k), "sum")
        if c:
            r = R.multiply(y, k)
        else:
            r = y
        return R.ccl.allreduce(r, "sum")
"""
    k, world = np.arange(4, dtype="float32"), session.num_workers
    mod = tvm.script.parser.parse(source, extra_vars={"k": relax.const(k), "I": I, "R": R})
    program, _ = compiled(mod, world)
    main = session.load_vm_module(program)["main"]
    ones = [np.ones(4, "float32")] * world
    for result in run(session, main, ones, [np.array(taken)] * world):
        np.testing.assert_array_equal(result, world**2 * k * (k if taken else 1))
