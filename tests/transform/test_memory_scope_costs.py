# SPDX-License-Identifier: Apache-2.0
"""Which of several plans PlanMemoryScopes takes: the one whose copies move the fewest bytes."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.transform.scope_programs import copies, plan
from tests.transform.script_forms import F8, alloc, custom_allreduce
from tvm_ipc.transform.memory_scopes.collect import collect
from tvm_ipc.transform.memory_scopes.copy_costs import describe, estimate, find_frequencies
from tvm_ipc.transform.memory_scopes.operator_scope_demands import DEFAULT_REGISTRY
from tvm_ipc.transform.memory_scopes.scopes_of_prim_func_params import PrimFuncParams

N = tvm.tirx.Var("n", "int64")


@pytest.mark.parametrize(
    ("ty", "size", "text"),
    [
        (relax.TensorType((3, 5), "float16"), 30, "30 bytes"),
        (relax.TensorType((), "float32"), 4, "4 bytes"),
        (relax.TensorType((0, 5), "float32"), 0, "0 bytes"),
        (relax.TensorType((N, 2), "float32"), 64 * 8, "n * 8 bytes"),
        (relax.TensorType((N + 1, N), "int8"), 64 * 64, "(n + T.int64(1)) * n * 1 bytes"),
        (relax.TensorType(ndim=3, dtype="int8"), 64**3, "an unknown number of bytes"),
        (relax.TensorType(ndim=0, dtype="int8"), 64, "an unknown number of bytes"),
        (relax.TensorType(None, dtype="int16"), 2 * 64, "an unknown number of bytes"),
        (relax.TensorType((2,), None), 64**2, "an unknown number of bytes"),
        (relax.AnyType(), 64**2, "an unknown number of bytes"),
    ],
    ids=str,
)
def test_the_size_of_a_copy(ty, size, text):
    assert estimate(ty, {}) == size and describe(ty) == text


def test_a_bound_says_how_large_a_symbolic_extent_is():
    assert estimate(relax.TensorType((N, 2), "float32"), {"n": 10}) == 80


def test_one_copy_after_an_if_is_better_than_one_in_each_branch():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), p: F8, q: F8):
            y = alloc(8)
            if c:
                x = p
            else:
                x = q
            _ = custom_allreduce(x, y)
            return R.tuple()

    assert copies(plan(Before)["main"]) == [("x", "x_ipc")]


def frequencies(module: tvm.IRModule) -> dict[str, float]:
    """How often each function runs while each one that is called from outside runs once."""
    program = collect(module, DEFAULT_REGISTRY, PrimFuncParams(module), every=False)
    find_frequencies(program)
    return {facts.name: facts.frequency for facts in program.functions}


def test_a_function_runs_as_often_as_it_is_called():
    @I.ir_module
    class Before:
        @R.function(pure=False, private=True)
        def inner(p: F8) -> R.Tuple():
            return R.tuple()

        @R.function(pure=False, private=True)
        def outer(c: R.Tensor((), "bool"), p: F8) -> R.Tuple():
            cls = Before
            if c:
                r: R.Tuple() = cls.inner(p)
            else:
                r: R.Tuple() = R.tuple()
            return r

        @R.function(pure=False, private=True)
        def again(c: R.Tensor((), "bool"), p: F8) -> R.Tuple():
            cls = Before
            r: R.Tuple() = cls.again(c, p)
            return r

        @R.function(pure=False, private=True)
        def ping(c: R.Tensor((), "bool"), p: F8) -> R.Tuple():
            cls = Before
            r: R.Tuple() = cls.pong(c, p)
            return r

        @R.function(pure=False, private=True)
        def pong(c: R.Tensor((), "bool"), p: F8) -> R.Tuple():
            cls = Before
            r: R.Tuple() = cls.ping(c, p)
            return r

        @R.function(pure=False, private=True)
        def never(p: F8) -> R.Tuple():
            return R.tuple()

        @R.function(pure=False)
        def main(c: R.Tensor((), "bool"), p: F8) -> R.Tuple():
            cls = Before
            cls.outer(c, p)
            cls.outer(c, p)
            cls.inner(p)
            cls.again(c, p)
            cls.ping(c, p)
            return R.tuple()

        @R.function(pure=False)
        def other(p: F8) -> R.Tuple():
            cls = Before
            cls.inner(p)
            return R.tuple()

    found = frequencies(Before)
    once = {"main": 1, "other": 1, "never": 1, "ping": 1}
    assert found == {**once, "outer": 2, "inner": 3, "again": 8, "pong": 8}


def test_however_often_a_function_runs_it_is_a_number():
    """Each of a chain of functions calls the next one twice, in a recursion."""
    builder, flag = relax.BlockBuilder(), relax.TensorType((), "bool")
    for number in range(60):
        c = relax.Var("c", flag)
        with builder.function(f"f{number}", [c], pure=False, private=True):
            if number:
                callee = builder.get().get_global_var(f"f{number - 1}")
                builder.emit(relax.Call(callee, [c]))
                builder.emit(relax.Call(callee, [c]))
            builder.emit_func_output(c)
    last = builder.get().get_global_var("f59")
    c = relax.Var("c", flag)
    with builder.function("main", [c], pure=False):
        builder.emit_func_output(builder.emit(relax.Call(last, [c])))
    found = frequencies(builder.get())
    assert found["f58"] == 2 and found["f30"] == 2**29 and found["f0"] == found["f1"] == 1e12
