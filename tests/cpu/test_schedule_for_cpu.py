# SPDX-License-Identifier: Apache-2.0
"""ScheduleForCPU: loops for vectors, the numbers that they give, and what is left alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tests.one_function_modules import functions, one_function
from tests.transform.loads import power
from tvm_ipc.cpu import ScheduleForCPU
from tvm_ipc.cpu.kernels.vector_math import FUNCTIONS
from tvm_ipc.transform import LegalizeOps, collect_report

#: Without an instruction that multiplies and adds, which rounds once.
BARE = '{"kind": "llvm", "mcpu": "x86-64"}'
HERE = tvm_ipc.cpu_target()
AVX2 = tvm.target.Target({"kind": "llvm", "mcpu": "haswell", "opt-level": 3})
LOWER = [
    LegalizeOps(),
    relax.transform.AnnotateTIROpPattern(),
    relax.transform.FoldConstant(),
    relax.transform.FuseOps(),
    relax.transform.FuseTIR(),
]


def lowered(mod: tvm.IRModule) -> tvm.IRModule:
    with HERE:
        return tvm.transform.Sequential(LOWER)(mod)


def assert_gives(before: tvm.IRModule, expected: tvm.IRModule) -> None:
    tvm.ir.assert_structural_equal(ScheduleForCPU(lanes=4)(before), expected, True)


# ---- what becomes of kernels -----------------------------------------------------------------


def test_a_stage_is_computed_where_it_is_read() -> None:
    @I.ir_module
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def kernel(
            a: T.Buffer((T.int64(6), T.int64(10)), "float32"),
            c: T.Buffer((T.int64(6), T.int64(10)), "float32"),
        ) -> None:
            b = T.sblock_alloc_buffer((T.int64(6), T.int64(10)))
            for i, j in T.grid(T.int64(6), T.int64(10)):
                with T.sblock("doubled"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    b[vi, vj] = a[vi, vj] * T.float32(2)
            for i, j in T.grid(T.int64(6), T.int64(10)):
                with T.sblock("halves"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    c[vi, vj] = T.if_then_else(vj < T.int64(4), b[vi, vj], b[vi, vj - T.int64(4)])

    @I.ir_module
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def kernel(
            a: T.Buffer((T.int64(6), T.int64(10)), "float32"),
            c: T.Buffer((T.int64(6), T.int64(10)), "float32"),
        ) -> None:
            T.func_attr({"tirx.is_scheduled": True})
            with T.sblock("root"):
                T.reads()
                T.writes()
                for i in range(T.int64(6)):
                    for j in range(T.int64(4)):
                        c[i, j] = a[i, j] * T.float32(2)
                    for j in range(T.int64(6)):
                        c[i, T.int64(4) + j] = a[i, j] * T.float32(2)

    assert_gives(Before, Expected)


def test_rows_that_a_condition_leaves_out_are_not_reduced() -> None:
    @I.ir_module
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def kernel(
            a: T.Buffer((T.int64(6), T.int64(8)), "float32"),
            row: T.Buffer((T.int64(3),), "int64"),
            c: T.Buffer((T.int64(3),), "float32"),
        ) -> None:
            for i, k in T.grid(T.int64(3), T.int64(8)):
                with T.sblock("total"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    with T.init():
                        c[vi] = T.float32(0)
                    c[vi] = c[vi] + T.if_then_else(
                        T.int64(0) <= row[vi], a[row[vi], vk], T.float32(0)
                    )

    @I.ir_module
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def kernel(
            a: T.Buffer((T.int64(6), T.int64(8)), "float32"),
            row: T.Buffer((T.int64(3),), "int64"),
            c: T.Buffer((T.int64(3),), "float32"),
        ) -> None:
            T.func_attr({"tirx.is_scheduled": True})
            with T.sblock("root"):
                T.reads()
                T.writes()
                lanes = T.sblock_alloc_buffer((4,))
                for i in range(T.int64(3)):
                    if T.int64(0) <= row[i]:
                        for lane in T.vectorized(4):
                            lanes[lane] = T.float32(0)
                        for k in range(T.int64(2)):
                            for lane in T.vectorized(4):
                                lanes[lane] = (
                                    lanes[lane] + a[row[i], k * T.int64(4) + T.Cast("int64", lane)]
                                )
                        for lane in T.vectorized(2):
                            lanes[lane] = lanes[lane] + lanes[lane + 2]
                        c[i] = lanes[0] + lanes[1]
                    else:
                        c[i] = T.float32(0)

    assert_gives(Before, Expected)


def test_rows_and_lanes() -> None:
    @I.ir_module
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.Buffer((T.int64(6), T.int64(10)), "float32"), c_handle: T.handle) -> None:
            c = T.match_buffer(c_handle, (T.int64(6), T.int64(10)), "float32")
            total = T.sblock_alloc_buffer((T.int64(6),))
            for i, k in T.grid(T.int64(6), T.int64(10)):
                with T.sblock("total"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    with T.init():
                        total[vi] = T.float32(0)
                    total[vi] = total[vi] + a[vi, vk]
            for i, j in T.grid(T.int64(6), T.int64(10)):
                with T.sblock("less"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    c[vi, vj] = a[vi, vj] - total[vi]

    @I.ir_module
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def kernel(a: T.Buffer((T.int64(6), T.int64(10)), "float32"), c_handle: T.handle) -> None:
            T.func_attr({"tirx.is_scheduled": True})
            c = T.match_buffer(c_handle, (T.int64(6), T.int64(10)), "float32")
            with T.sblock("root"):
                T.reads()
                T.writes()
                total = T.sblock_alloc_buffer((T.int64(1),))
                lanes = T.sblock_alloc_buffer((4,))
                for i in range(T.int64(6)):
                    for lane in T.vectorized(4):
                        lanes[lane] = T.float32(0)
                    for k in range(T.int64(2)):
                        for lane in T.vectorized(4):
                            lanes[lane] = lanes[lane] + a[i, k * T.int64(4) + T.Cast("int64", lane)]
                    for k in range(T.int64(2)):
                        lanes[0] = lanes[0] + a[i, T.int64(8) + k]
                    for lane in T.vectorized(2):
                        lanes[lane] = lanes[lane] + lanes[lane + 2]
                    total[T.int64(0)] = lanes[0] + lanes[1]
                    for j in range(T.int64(10)):
                        c[i, j] = a[i, j] - total[T.int64(0)]

    assert_gives(Before, Expected)


# ---- numbers ---------------------------------------------------------------------------------


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x: Any, w: Any, b: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * w + b


def rotated(x: Any, c: Any, s: Any) -> Any:
    half = x.shape[-1] // 2
    return x * c + np.concatenate([-x[..., half:], x[..., :half]], -1) * s


def rotate(x: Any, c: Any, s: Any, half: int) -> Any:
    upper = op.strided_slice(x, [-1], [half], [2 * half])
    lower = op.strided_slice(x, [-1], [0], [half])
    turned = op.concat([op.negative(upper), lower], axis=-1)
    return op.add(op.multiply(x, c), op.multiply(turned, s))


def erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[float])(x)


#: What is computed, in Relax and in NumPy; the shapes of what it is given, of rows and columns.
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "softmax": (op.nn.softmax, softmax, "mn"),
    "silu": (
        lambda x, y: op.multiply(op.nn.silu(x), y),
        lambda x, y: x / (1 + np.exp(-x)) * y,
        "mn mn",
    ),
    "gelu": (op.nn.gelu, lambda x: 0.5 * x * (1 + erf(x / 2**0.5)), "mn"),
    "tanh": (lambda x: op.tanh(op.add(x, x)), lambda x: np.tanh(2 * x), "mn"),
    "rms_norm": (
        lambda x, w: op.nn.rms_norm(x, w, axes=[-1], epsilon=1e-5),
        lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w,
        "mn n",
    ),
    "layer_norm": (lambda x, w, b: op.nn.layer_norm(x, w, b, axes=[-1]), layer_norm, "mn n n"),
    "sum": (lambda x: op.sum(x, axis=[-1]), lambda x: x.sum(-1), "mn"),
    "sum_of_rows": (lambda x: op.sum(x, axis=[0]), lambda x: x.sum(0), "mn"),
    "sum_of_all": (
        lambda x: op.sum(op.abs(x), axis=None, keepdims=True),
        lambda x: np.abs(x).sum(keepdims=True),
        "mn",
    ),
    "max": (
        lambda x: op.max(x, axis=[-1], keepdims=True),
        lambda x: x.max(-1, keepdims=True, initial=-np.inf),
        "mn",
    ),
    "min_of_rows": (lambda x: op.min(x, axis=[0]), lambda x: x.min(0), "mn"),
    "product_of_sums": (
        lambda x, y: op.multiply(op.sum(x, axis=[-1], keepdims=True), y),
        lambda x, y: x.sum(-1, keepdims=True) * y,
        "mn mn",
    ),
    "transpose": (
        lambda x: op.add(op.permute_dims(x), op.permute_dims(x)),
        lambda x: x.T + x.T,
        "mn",
    ),
    "broadcast": (
        lambda x, b: op.maximum(op.add(x, b), op.multiply(x, b)),
        lambda x, b: np.maximum(x + b, x * b),
        "mn n",
    ),
    "concat": (
        lambda x, y: op.concat([x, op.negative(y)], axis=1),
        lambda x, y: np.concatenate([x, -y], 1),
        "mn mn",
    ),
    "square": (lambda x: op.power(x, relax.const(2.0, str(x.ty.dtype))), lambda x: x * x, "mn"),
}
#: Rows and columns: none, one, fewer than lanes, as many, more, many.
SIZES = [(0, 5), (4, 0), (1, 1), (3, 7), (5, 64), (2, 66), (7, 300), (1, 5000)]
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2, "float64": 1e-12}


def unknown() -> dict[str, Any]:
    return {"m": tirx.Var("m", "int64"), "n": tirx.Var("n", "int64")}


def shaped(shapes: str, sizes: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(sizes[letter] for letter in shape) for shape in shapes.split()]


def module_of(cases: list[tuple[str, dict[str, Any]]], dtype: str) -> tvm.IRModule:
    """Return a module with a function for each case."""
    made = {}
    for number, (name, sizes) in enumerate(cases):
        make, _, shapes = PROGRAMS[name]
        params = {f"x{place}": shape for place, shape in enumerate(shaped(shapes, sizes))}
        made[f"case{number}"] = (lambda _, *given, make=make: make(*given)), params
    return functions(made, dtype)


def check(machine: Any, number: int, name: str, dtype: str, sizes: dict[str, int]) -> None:
    _, expected, shapes = PROGRAMS[name]
    generator = np.random.default_rng(number)
    given = [generator.standard_normal(shape).astype(dtype) for shape in shaped(shapes, sizes)]
    wanted = expected(*(one.astype("float64") for one in given))
    found = machine[f"case{number}"](*map(tvm.runtime.tensor, given)).numpy().astype("float64")
    assert found.shape == wanted.shape
    size = np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0)
    label = f"{name} of {dtype}, {sizes}"
    if name == "max" and sizes["n"] == 0:
        return
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[dtype] * size, err_msg=label)


def virtual_machine(mod: tvm.IRModule, target: Any) -> Any:
    pipeline = tvm_ipc.get_pipeline(target, 1)
    return relax.VirtualMachine(tvm.compile(mod, target, relax_pipeline=pipeline), tvm.cpu())


#: What TVM has for no bfloat16.
NOT_BFLOAT16 = ("layer_norm", "square")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers(dtype: str, request: pytest.FixtureRequest) -> None:
    rounds = request.config.getoption("--operator-rounds")
    names = [one for one in PROGRAMS if dtype != "bfloat16" or one not in NOT_BFLOAT16]
    cases = [
        (name, {"m": m, "n": n})
        for place, name in enumerate(names)
        for m, n in [SIZES[(place + step) % len(SIZES)] for step in range(min(rounds, len(SIZES)))]
        if not (name == "min_of_rows" and m == 0)
    ]
    machine = virtual_machine(module_of(cases, dtype), HERE)
    for number, (name, sizes) in enumerate(cases):
        check(machine, number, name, dtype, sizes)


def test_numbers_of_sizes_that_are_not_known() -> None:
    mod = module_of([(name, unknown()) for name in PROGRAMS], "float32")
    with collect_report() as report:
        machine = virtual_machine(mod, HERE)
    left = [one.subject for one in report.decisions if one.pass_name == "ScheduleForCPU"]
    assert not left
    for (number, name), (m, n) in product(enumerate(PROGRAMS), [(1, 1), (3, 7), (2, 66), (5, 300)]):
        check(machine, number, name, "float32", {"m": m, "n": n})


def test_functions_of_functions() -> None:
    """Six of them, each of what the one before gave; minutes if one were put into the next."""

    def nested(x: Any) -> Any:
        return te.compute(x.shape, lambda *i: te.exp(te.tanh(te.sigmoid(x(*i)) * 0.7) * 1.3))

    def result(emit: Any, x: relax.Var) -> relax.Expr:
        y = relax.BlockBuilder.current().emit_te(nested, x)
        for function in (op.tanh, op.sigmoid, op.erf, op.exp, op.tanh, op.exp):
            y = emit(op.multiply(emit(function(y)), relax.const(0.9)))
        return y

    machine = virtual_machine(one_function(result, {"x": (3, 130)}), HERE)
    given = np.linspace(-9, 9, 390).reshape(3, 130)
    found = machine["main"](tvm.runtime.tensor(given.astype("float32"))).numpy()
    wanted = np.exp(np.tanh(0.7 / (1 + np.exp(-given))) * 1.3)
    sigmoid, erf = (lambda v: 1 / (1 + np.exp(-v))), np.vectorize(math.erf)
    for function in (np.tanh, sigmoid, erf, np.exp, np.tanh, np.exp):
        wanted = 0.9 * function(wanted)
    np.testing.assert_allclose(found, wanted, rtol=2e-6)


def test_axes_that_were_joined_and_are_read_backwards() -> None:
    """TVM alone takes the indices for others when one loop does it all."""
    cases = [
        ([2, 3, 8, 4], [1, 2, 0, 3], [3, 8, 8], 2),
        ([2, 3, 8, 4], [1, 2, 0, 3], [24, 8], 1),
        ([3, 5, 2], [2, 0, 1], [2, 15], 1),
        ([3, 5, 2], [1, 2, 0], [30], 0),
        ([4, 6], [1, 0], [3, 8], 1),
        ([4, 6], [0, 1], [2, 12], 0),
        ([12, 2], [0, 1], [3, 4, 2], 1),
        ([2, 2, 2, 2], [3, 0, 2, 1], [4, 4], 0),
    ]

    def flip(emit: Any, x: Any, *, k: int, step: int) -> Any:
        _, order, joined, axis = cases[k]
        y, n = emit(op.reshape(emit(op.permute_dims(x, order)), joined)), joined[axis]
        return (
            op.flip(y, axis)
            if step == 1
            else op.strided_slice(y, [axis], [n - 1], [-n - 1], [-step])
        )

    made = {
        f"flip_{k}_{step}": (partial(flip, k=k, step=step), {"x": shape})
        for (k, (shape, *_)), step in product(enumerate(cases), (1, 2))
    }
    machine = virtual_machine(functions(made), HERE)
    for k, (shape, order, joined, axis) in enumerate(cases):
        given = np.arange(np.prod(shape), dtype="float32").reshape(shape)
        wanted = np.flip(given.transpose(order).reshape(joined), axis)
        for step in (1, 2):
            found = machine[f"flip_{k}_{step}"](tvm.runtime.tensor(given)).numpy()
            part = np.take(wanted, range(0, joined[axis], step), axis)
            np.testing.assert_array_equal(found, part, str(cases[k]))


def test_rotary_positions_and_embeddings() -> None:
    def result(emit: Any, x: Any, c: Any, s: Any, table: Any, ids: Any) -> Any:
        heads = op.permute_dims(op.reshape(x, (5, 4, 16)), [1, 0, 2])
        return relax.Tuple([emit(rotate(heads, c, s, 8)), emit(op.take(table, ids, axis=0))])

    shapes = {"x": (5, 64), "c": (5, 16), "s": (5, 16), "table": (9, 70)}
    mod = one_function(result, {**shapes, "ids": relax.TensorType((6,), "int32")})
    machine = virtual_machine(mod, HERE)
    generator = np.random.default_rng(0)
    given = [generator.standard_normal(shape).astype("float32") for shape in shapes.values()]
    places = np.array([8, 0, 3, 3, 1, 5], "int32")
    found = machine["main"](*map(tvm.runtime.tensor, (*given, places)))
    heads = given[0].reshape(5, 4, 16).transpose(1, 0, 2)
    np.testing.assert_allclose(found[0].numpy(), rotated(heads, *given[1:3]), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found[1].numpy(), given[3][places])


def test_rows_that_are_read_elsewhere_are_no_common_rows() -> None:
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def main(
            a: T.Buffer((T.int64(6), T.int64(40)), "float32"),
            c: T.Buffer((T.int64(6), T.int64(40)), "float32"),
        ) -> None:
            total = T.sblock_alloc_buffer((T.int64(6),))
            for i, k in T.grid(T.int64(6), T.int64(40)):
                with T.sblock("total"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    with T.init():
                        total[vi] = T.float32(0)
                    total[vi] = total[vi] + a[vi, vk]
            for i, j in T.grid(T.int64(6), T.int64(40)):
                with T.sblock("less"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    c[vi, vj] = a[vi, vj] - total[T.int64(5) - vi]

    a = np.random.default_rng(0).standard_normal((6, 40)).astype("float32")
    result = tvm.runtime.tensor(np.zeros_like(a))
    tvm.compile(ScheduleForCPU()(Module), HERE)["main"](tvm.runtime.tensor(a), result)
    np.testing.assert_allclose(result.numpy(), a - a.sum(1)[::-1, None], rtol=0, atol=1e-5)


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    patterns = np.arange(0, 1 << 32, 65521, dtype=np.uint64).astype(np.uint32)
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1])
    x = np.concatenate([patterns, ties.astype(np.uint32)]).view(np.float32)
    mod = one_function(lambda _, x: op.astype(op.abs(x), "bfloat16"), {"x": (len(x),)})
    found = virtual_machine(mod, HERE)["main"](tvm.runtime.tensor(x)).numpy()
    with np.errstate(invalid="ignore"):
        expected = np.abs(x).astype(ml_dtypes.bfloat16)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(np.isnan(found.astype("float32")), ~number)
    np.testing.assert_array_equal(found.view(np.uint16)[number], expected.view(np.uint16)[number])


# ---- functions -------------------------------------------------------------------------------

EXACT: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "sigmoid": lambda x: np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x))),
    "tanh": np.tanh,
    "erf": erf,
}
SPECIAL = np.array(
    [
        *(0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 1.1754944e-38, 3.4e38, -3.4e38),
        *(88.72283, 88.72284, -87.33655, -103.27893, -103.97208, -104, 0.625, 0.92, 4, -4),
    ],
    "float32",
)


def of_element(function: Callable[[Any], Any], x: Any, i: Any) -> Any:
    return function(x(i))


@cache
def functions_for(target: str) -> Any:
    """Return a module that applies each function to a vector."""
    count = tirx.Var("n", "int64")
    kernels = {}
    for name, function in FUNCTIONS.items():
        x = tvm.te.placeholder((count,), "float32", name="x")
        y = tvm.te.compute((count,), partial(of_element, function, x), name="y")
        kernels[name] = tvm.te.create_prim_func([x, y]).with_attr("global_symbol", name)
    return tvm.compile(
        tvm.IRModule(kernels), tvm.target.Target(json.loads(target)) if target else HERE
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("target", ["", BARE])
def test_functions_over_all_floats(name: str, target: str, request: pytest.FixtureRequest) -> None:
    """Each exponent, many fractions: those that 2**32 divided by a prime are."""
    step = 80021 if request.config.getoption("--operator-rounds") == 1 else 1009
    patterns = np.arange(0, 1 << 32, step, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([SPECIAL, patterns.view(np.float32)])
    result = tvm.runtime.tensor(np.zeros_like(x))
    functions_for(target)[name](tvm.runtime.tensor(x), result)
    found = result.numpy()
    with np.errstate(all="ignore"):
        exact = EXACT[name](x.astype("float64"))
        nearest = exact.astype("float32")
        np.testing.assert_array_equal(np.isnan(found), np.isnan(x))
        # What overflows is infinite, and the other way round.
        infinite = np.isinf(nearest)
        np.testing.assert_array_equal(found[infinite], nearest[infinite])
        finite = np.isfinite(nearest)
        unit = np.spacing(np.abs(nearest[finite])).astype("float64")
        units = np.abs(found[finite].astype("float64") - exact[finite]) / unit
    assert units.max() <= 2, x[finite][units.argmax()]
    # Of zero the sign, too.
    if name in ("tanh", "erf"):
        np.testing.assert_array_equal(np.signbit(found[:2]), [False, True])


# ---- vectors ---------------------------------------------------------------------------------

VECTORISED = [
    *("softmax", "silu", "gelu", "tanh", "rms_norm", "layer_norm"),
    *("sum", "sum_of_rows", "concat", "square"),
]


@pytest.mark.slow
@pytest.mark.parametrize("extent", [256, None])
def test_loops_are_vectors(extent: int | None) -> None:
    """What the processor runs: instructions of 8 float32 in every function, and no call of exp."""
    # Where two rows of unknown lengths meet, TVM's code asks for each element which one it is of.
    cases = [
        (name, {"m": 8, "n": extent} if extent else unknown())
        for name in VECTORISED
        if extent or name != "concat"
    ]
    mod = module_of(cases, "float32")
    executable = tvm.compile(mod, AVX2, relax_pipeline=tvm_ipc.get_pipeline(AVX2, 1))
    assembler = executable.mod.imports[0].inspect_source("asm")
    assert not re.findall(r"\b(?:expf|tanhf|erff|powf)\b", assembler)
    # Of each function its own text: from its label to the next one.
    parts = re.split(r"^(\w+):$", assembler, flags=re.MULTILINE)
    kernels = {
        name: body
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
        if name.endswith("_compute_") and not name.startswith("shape_func")
    }
    assert len(kernels) >= len(cases)
    for name, body in kernels.items():
        assert re.search(r"\bv(?:add|sub|mul|xor)ps\s.*%ymm", body), name


# ---- what is left alone ------------------------------------------------------------------------


@I.ir_module
class Written:
    @T.prim_func(private=True, s_tir=True)
    def by_hand(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")) -> None:
        for i in range(4):
            b[i] = T.exp(a[i])

    @T.prim_func(private=True, s_tir=True)
    def scheduled(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")) -> None:
        for i, j in T.grid(2, 4):
            with T.sblock("exp"):
                v = T.axis.spatial(8, i * 4 + j)
                b[v] = T.exp(a[v])

    @T.prim_func(private=True, s_tir=True)
    def parallel(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")) -> None:
        for i in T.parallel(8):
            with T.sblock("exp"):
                v = T.axis.spatial(8, i)
                b[v] = T.exp(a[v])

    @T.prim_func(private=True, s_tir=True)
    def marked(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")) -> None:
        T.func_attr({"tirx.is_scheduled": True})
        for i in range(8):
            with T.sblock("exp"):
                v = T.axis.spatial(8, i)
                b[v] = T.exp(a[v])

    @T.prim_func(private=True, s_tir=True)
    def scan(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")) -> None:
        for i in range(8):
            with T.sblock("scan"):
                v = T.axis.spatial(8, i)
                b[v] = T.if_then_else(v == 0, a[0], b[v - 1] + a[v])

    @T.prim_func(private=True, s_tir=True)
    def largest(
        a: T.Buffer((8,), "float32"), b: T.Buffer((1,), "float32"), place: T.Buffer((1,), "int32")
    ) -> None:
        for k in range(8):
            with T.sblock("largest"):
                vk = T.axis.reduce(8, k)
                with T.init():
                    b[0] = T.float32(-1)
                    place[0] = 0
                b[0] = T.max(b[0], a[vk])
                place[0] = T.Select(b[0] >= a[vk], place[0], vk)

    @T.prim_func(private=True, s_tir=True)
    def part(a: T.Buffer((4,), "float32"), b: T.Buffer((8,), "float32")) -> None:
        for i in range(4):
            with T.sblock("part"):
                v = T.axis.spatial(4, i)
                b[v] = a[v]

    @T.prim_func(private=True, s_tir=True)
    def reshape(
        a: T.Buffer((T.int64(4), T.int64(2)), "float32"), b: T.Buffer((T.int64(8),), "float32")
    ) -> None:
        for i in range(T.int64(8)):
            with T.sblock("reshape"):
                v = T.axis.spatial(T.int64(8), i)
                b[v] = a[v // T.int64(2), v % T.int64(2)]


def test_what_somebody_wrote_is_left_alone() -> None:
    with collect_report() as report:
        after = ScheduleForCPU()(Written)
    tvm.ir.assert_structural_equal(after, Written)
    said = {one.function: one.reason for one in report.decisions}
    assert said == {
        "by_hand": "its body is not a block",
        "scheduled": "its block exp has an axis that is not a loop variable",
        "parallel": "its loop i is scheduled",
        "scan": "its block scan reads the buffer that it writes",
        "largest": "its block largest computes a buffer from another one that it writes",
        "part": "its block part writes only a part of a buffer",
        "reshape": "it is a reshape",
    }


def test_what_is_called_in_place_is_left_alone() -> None:
    @I.ir_module
    class Module:
        @T.prim_func(private=True, s_tir=True)
        def double(a: T.Buffer((T.int64(8),), "float32")) -> None:
            for i in range(T.int64(8)):
                with T.sblock("double"):
                    v = T.axis.spatial(T.int64(8), i)
                    a[v] = a[v] * T.float32(2)

        @R.function
        def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
            cls = Module
            with R.dataflow():
                y = R.call_tir_inplace(
                    cls.double, (x,), inplace_indices=[0], out_ty=R.Tensor((8,), "float32")
                )
                R.output(y)
            return y

    with collect_report() as report:
        tvm.ir.assert_structural_equal(ScheduleForCPU()(Module), Module)
    assert [one.reason for one in report.decisions] == ["it is called in place"]


def test_work_grows_with_kernels() -> None:
    def modules(count: int) -> tvm.IRModule:
        cases = [("softmax", {"m": 3, "n": 5 + place}) for place in range(count)]
        return lowered(module_of(cases, "float32"))

    made = {count: modules(count) for count in (4, 8, 16)}
    assert power(lambda count: ScheduleForCPU()(made[count]), 4) < 1.1


def test_functions_that_are_alike_are_scheduled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm_ipc.cpu import schedule_for_cpu

    calls = []
    original = schedule_for_cpu.schedule
    monkeypatch.setattr(
        schedule_for_cpu, "schedule", lambda *a, **b: calls.append(1) or original(*a, **b)
    )
    mod = lowered(module_of([("softmax", {"m": 3, "n": 5})] * 2, "float32"))
    names = [var for var, function in mod.functions_items() if isinstance(function, tirx.PrimFunc)]
    mod["again"] = mod[names[0]].with_attr("global_symbol", "again")
    after = ScheduleForCPU()(mod)
    assert len(calls) == 1
    assert after["again"].attrs["global_symbol"] == "again"


def test_a_kernel_that_tvm_cannot_analyse_is_not_scheduled() -> None:
    """TVM's analysis of reshapes ends in an InternalError for these extents."""
    mod = tvm.script.from_source("""
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32")):
        n = T.int64()
        rows = R.strided_slice(x, axes=[0], begin=[0], end=[n - 1], strides=[1])
        return R.reshape(R.maximum(rows, R.negative(rows)), R.shape([T.int64(4), n - 1]))
""")
    with collect_report() as report:
        executable = tvm.compile(mod, "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 1))
    reasons = [one.reason for one in report.decisions if one.pass_name == "ScheduleForCPU"]
    assert "TVM cannot analyse whether it is a reshape" in reasons
    x = np.random.default_rng(1).standard_normal((4, 4)).astype("float32")
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x))
    np.testing.assert_array_equal(result.numpy(), np.abs(x[:3]).reshape(4, 3))
