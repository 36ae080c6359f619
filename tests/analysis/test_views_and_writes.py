# SPDX-License-Identifier: Apache-2.0
"""Views and writes of calls, and the tables of others that must agree with them."""

# ruff: noqa: F841  # the variables name the calls

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_ipc.analysis.primfunc_effects import PrimFuncs
from tvm_ipc.analysis.program_order import linearize
from tvm_ipc.analysis.views_and_writes_of_calls import (
    VIEWS,
    computes_result,
    viewed,
    written_arguments,
)
from tvm_ipc.packed_functions.program_function_declarations import OWN_SLICE, VIEW
from tvm_ipc.tools.inspection import peak_live_bytes
from tvm_ipc.verify import known_calls

F8 = R.Tensor((8,), "float32")


@I.ir_module
class Calls:
    """Calls of each kind; `x` and `y` are their tensors."""

    @T.prim_func(private=True)
    def move(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
        for i in range(8):
            b[i] = a[i]

    @R.function(pure=False, private=True)
    def other(x: F8) -> F8:
        return x

    @R.function(pure=False)
    def main(x: F8, y: F8, f: R.Callable((F8,), F8, False)):
        cls = Calls
        reshape = R.reshape(x, R.shape([2, 4]))
        memory_view = R.memory.view(x, R.shape([2, 4]))
        view = R.call_packed("tvm_ipc.view", x, 0, R.shape([4]), ty_args=(F8,))
        pure_view = R.call_pure_packed("tvm_ipc.view", x, 0, R.shape([4]), ty_args=(F8,))
        vm_reshape = R.call_packed("vm.builtin.reshape", x, R.shape([8]), ty_args=(F8,))
        add = R.add(x, y)
        kernel = cls.move(x, y)
        call_tir = R.call_tir(cls.move, (x,), out_ty=F8)
        inplace = R.call_tir_inplace(cls.move, (x, y), inplace_indices=[1], out_ty=F8)
        copy = R.call_packed("tvm_ipc.copy", x, y, ty_args=(R.Tuple,))
        pure_copy = R.call_pure_packed("tvm_ipc.copy", x, y, ty_args=(R.Tuple,))
        unknown = R.call_packed("unknown", x, y, ty_args=(F8,))
        call_dps = R.call_dps_packed("unknown", (x, y), out_ty=F8)
        relax_call = cls.other(x)
        closure = f(x)
        return add


STEPS = {str(step.var.name): step.value for step in linearize("main", Calls["main"]).points}


@pytest.mark.parametrize("name", STEPS)
def test_views(name: str):
    is_view = "view" in name or "reshape" in name
    source = viewed(STEPS[name])
    assert (str(source.name) if source is not None else None) == ("x" if is_view else None)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("reshape", []),
        ("add", []),
        ("kernel", ["y"]),
        ("call_tir", []),
        ("inplace", ["y"]),
        ("copy", ["y"]),
        ("pure_copy", ["y"]),
        ("unknown", ["x", "y"]),
        ("call_dps", []),
        ("relax_call", ["x"]),
        ("closure", ["x"]),
    ],
)
def test_written_arguments(name: str, written: list[str]):
    arguments = written_arguments(STEPS[name], PrimFuncs(Calls))
    assert [str(argument.name) for argument in arguments] == written


def test_writes_of_packed_functions_may_be_passed():
    call = STEPS["unknown"]
    arguments = written_arguments(call, PrimFuncs(Calls), lambda callee, count: {count - 1})
    assert [str(argument.name) for argument in arguments] == ["y"]


@pytest.mark.parametrize("name", ["call_builtin_with_ctx", "call_py_func", "invoke_closure"])
def test_operators_that_call_something_unknown_may_write_all(name: str):
    x = relax.Var("x", relax.TensorType((8,), "float32"))
    call = relax.Call(tvm.ir.Op.get(f"relax.{name}"), [x, x])
    assert len(written_arguments(call, PrimFuncs(Calls))) == 2


def test_a_kernel_with_symbolic_sizes_writes_like_another_one():
    x, y = (relax.Var(name, relax.TensorType((8,), "float32")) for name in "xy")
    move = Calls.get_global_var("move")
    call = relax.Call(tvm.ir.Op.get("relax.vm.call_tir_dyn"), [move, relax.Tuple([x, y])])
    assert written_arguments(call, PrimFuncs(Calls)) == [y]


# The verifier and the bound for the planner each have a table of their own, so that a mistake of
# the passes is not repeated there. The tables state facts about TVM, so they must be the same.


def test_the_verifier_has_the_same_views():
    of_signatures = {VIEW.name, OWN_SLICE.name}  # the verifier reads them in the signatures
    assert VIEWS - of_signatures == known_calls.SAME_MEMORY
    # The verifier also interprets copies and moves, whose results may be their arguments.
    assert known_calls.SAME_MEMORY <= known_calls.VIEWS | known_calls.VIEW_OPERATORS


def test_the_lower_bound_has_the_same_views():
    operators = {name for name in VIEWS if name.startswith("relax.")}
    assert {op.name for op in peak_live_bytes._VIEWS} == operators


X, Y = (relax.Var(name, R.Tensor((4, 4), "float32")) for name in ("x", "y"))
C = relax.Var("c", R.Tensor((4, 4), "bool"))
ZERO, ONE = (R.const(value, "float32") for value in (0.0, 1.0))
ROW = relax.Var("row", R.Tensor((4,), "float32"))
COMPUTING = [
    *(operator(X, Y) for operator in (R.add, R.divide, R.multiply, R.subtract, R.matmul)),
    *(operator(X, Y) for operator in (R.equal, R.greater, R.greater_equal, R.less, R.less_equal)),
    *(operator(X) for operator in (R.cos, R.exp, R.rsqrt, R.sigmoid, R.sin, R.sqrt, R.tanh)),
    *(operator(X) for operator in (R.nn.gelu, R.nn.gelu_tanh, R.nn.silu)),
    *(R.nn.softmax(X), R.nn.log_softmax(X), R.not_equal(X, Y), R.add(X, X), R.subtract(X, X)),
    *(R.nn.rms_norm(X, ROW, [1]), R.nn.layer_norm(X, ROW, ROW, [1])),
    *(R.where(C, X, ZERO), R.where(C, ONE, ZERO), R.astype(X, "float16"), R.astype(C, "int8")),
]
COPYING = [
    *(R.add(X, ZERO), R.subtract(X, ZERO), R.multiply(X, ONE), R.divide(X, ONE)),
    *(R.where(C, X, X), R.astype(X, "float32"), R.permute_dims(X, [0, 1])),
]


def lowered(call: relax.Call) -> list[tvm.tirx.PrimFunc]:
    """Return the kernels of a call."""
    builder = relax.BlockBuilder()
    with builder.function("main", relax.analysis.free_vars(call)):
        with builder.dataflow():
            result = builder.emit_output(call)
        builder.emit_func_output(result)
    mod = relax.transform.FoldConstant()(relax.transform.LegalizeOps()(builder.get()))
    return [f for _, f in mod.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]


@pytest.mark.parametrize("call", COMPUTING, ids=str)
def test_results_that_are_computed_never_become_views(call: relax.Call) -> None:
    call = relax.BlockBuilder().normalize(call)
    assert computes_result(call)
    kernels = lowered(call)
    assert kernels
    assert not any(map(relax.analysis.has_reshape_pattern, kernels))


@pytest.mark.parametrize("call", COPYING, ids=str)
def test_results_that_may_be_copies_may_become_views(call: relax.Call) -> None:
    call = relax.BlockBuilder().normalize(call)
    assert not computes_result(call)
