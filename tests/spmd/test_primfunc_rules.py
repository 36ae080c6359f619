# SPDX-License-Identifier: Apache-2.0
"""Sharding rules that follow from the bodies of PrimFuncs."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op
from tvm.script.parser import tirx as T

from tests.one_function_modules import one_function
from tvm_ipc.comm import Mesh, Shard, place
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd import LowerPlacements, parallelize
from tvm_ipc.spmd.rules.axis_label_rule import ALL_OF_IT, Rule
from tvm_ipc.spmd.rules.primfunc import PrimFuncAxes, primfunc_rule


def legalized(make: Any, **shapes: Any) -> tirx.PrimFunc:
    """Return the PrimFunc of one operator."""
    mod = relax.transform.LegalizeOps()(one_function(lambda emit, *xs: emit(make(*xs)), shapes))
    (function,) = (f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc))
    return function


def rule_of(function: tirx.PrimFunc, operands: int = 1) -> Rule:
    rule = primfunc_rule(function, operands, 1)
    assert rule is not None
    return rule


@pytest.mark.parametrize(
    ("make", "shapes", "operands", "result", "whole", "reduced"),
    [
        (op.exp, {"x": (4, 6)}, ((0, 1),), (0, 1), set(), {}),
        (op.permute_dims, {"x": (4, 6)}, ((0, 1),), (1, 0), set(), {}),
        (op.add, {"x": (4, 6), "y": (6,)}, ((0, 1), (1,)), (0, 1), set(), {}),
        (op.add, {"x": (4, 6), "y": (1, 6)}, ((0, 1), (None, 1)), (0, 1), set(), {}),
        (op.matmul, {"x": (4, 6), "y": (6, 8)}, ((0, 1), (1, 2)), (0, 2), set(), {1: "sum"}),
        (lambda x: op.sum(x, axis=0), {"x": (4, 6)}, ((0, 1),), (1,), set(), {0: "sum"}),
        # A mean scales the sum afterwards, and a maximum is no sum.
        (lambda x: op.mean(x, axis=0), {"x": (4, 6)}, ((0, 1),), (1,), {0}, {}),
        (lambda x: op.max(x, axis=1), {"x": (4, 6)}, ((0, 1),), (0,), {1}, {}),
        (op.nn.softmax, {"x": (4, 6)}, ((0, 1),), (0, 1), {1}, {}),
        # Elements are repeated: the index of the operand is computed.
        (lambda x: op.repeat(x, 2, 0), {"x": (4, 6)}, ((0, 1),), (2, 1), {0, 2}, {}),
    ],
)
def test_axes(
    make: Any, shapes: Any, operands: Any, result: Any, whole: set[int], reduced: dict[int, str]
) -> None:
    rule = rule_of(legalized(make, **shapes), len(shapes))
    assert (rule.operands, rule.results) == (operands, (result,))
    assert set(rule.whole) == whole
    assert rule.reduced == reduced
    assert all(why == ALL_OF_IT for why in rule.whole.values())


def test_ranks_that_do_not_divide_a_constant_extent() -> None:
    rule = rule_of(legalized(op.exp, x=(4, 6)))
    assert rule.why_not(0, 2) == ""
    assert rule.why_not(0, 3) == (
        "it is compiled for an extent of 4, which is no multiple of the 3 ranks: make that extent "
        "symbolic"
    )


def test_symbolic_extents() -> None:
    """Padding is no hindrance to elementwise functions, but a sum would include it."""
    n = tirx.Var("n", "int64")
    assert rule_of(legalized(op.exp, x=(n, 6))).why_not(0, 3) == ""
    total = rule_of(legalized(lambda x: op.sum(x, axis=0), x=(n, 6)))
    assert "it sums over n elements, which may be no multiple of the 3 ranks" in total.why_not(0, 3)


def test_a_value_that_depends_on_an_extent() -> None:
    """A rank would compute with the extent of its shard."""

    @T.prim_func(private=True, s_tir=True)
    def scaled(x_handle: T.handle, y_handle: T.handle):
        n = T.int64()
        x = T.match_buffer(x_handle, (n, 4), "float32")
        y = T.match_buffer(y_handle, (n, 4), "float32")
        for i, j in T.grid(n, 4):
            with T.sblock("y"):
                row, column = T.axis.remap("SS", [i, j])
                y[row, column] = x[row, column] / T.Cast("float32", n)

    assert set(rule_of(scaled).whole) == {0}


def test_a_condition_on_an_index() -> None:
    @T.prim_func(private=True, s_tir=True)
    def triangle(x: T.Buffer((4, 4), "float32"), y: T.Buffer((4, 4), "float32")):
        for i, j in T.grid(4, 4):
            with T.sblock("y"):
                row, column = T.axis.remap("SS", [i, j])
                y[row, column] = T.Select(row < column, T.float32(0), x[row, column])

    assert set(rule_of(triangle).whole) == {0, 1}


def test_elements_that_iterations_overwrite() -> None:
    """The last iteration of all ranks holds, not the last one of each rank."""

    @T.prim_func(private=True, s_tir=True)
    def last(x: T.Buffer((4, 6), "float32"), y: T.Buffer((6,), "float32")):
        for i, j in T.grid(4, 6):
            with T.sblock("y"):
                row, column = T.axis.remap("SS", [i, j])
                y[column] = x[row, column]

    @T.prim_func(private=True, s_tir=True)
    def scattered(
        x: T.Buffer((4, 6), "float32"), to: T.Buffer((4,), "int64"), y: T.Buffer((4, 6), "float32")
    ):
        for i, j in T.grid(4, 6):
            with T.sblock("y"):
                row, column = T.axis.remap("SS", [i, j])
                y[to[row], column] = x[row, column]

    assert set(rule_of(last).whole) == {0}
    rule = rule_of(scattered, 2)
    assert rule.operands == ((0, 1), (0,))
    assert {0, rule.results[0][0]} == set(rule.whole)


def test_a_sum_beside_another_result() -> None:
    """Only if all results are sums over an axis are all of them partial."""

    @T.prim_func(private=True, s_tir=True)
    def sum_and_copy(
        x: T.Buffer((4, 6), "float32"),
        w: T.Buffer((6,), "float32"),
        total: T.Buffer((6,), "float32"),
        copy: T.Buffer((6,), "float32"),
    ):
        for j, i in T.grid(6, 4):
            with T.sblock("total"):
                column, row = T.axis.remap("SR", [j, i])
                with T.init():
                    total[column] = T.float32(0)
                total[column] = total[column] + x[row, column]
        for j in T.grid(6):
            with T.sblock("copy"):
                column = T.axis.remap("S", [j])
                copy[column] = w[column]

    rule = primfunc_rule(sum_and_copy, 2, 2)
    assert rule is not None
    assert set(rule.whole) == {0}
    assert rule.reduced == {}


def test_a_value_that_is_computed_before_the_loop() -> None:
    @T.prim_func(private=True, s_tir=True)
    def shifted(x_handle: T.handle, y_handle: T.handle):
        n = T.int64()
        x = T.match_buffer(x_handle, (n,), "float32")
        y = T.match_buffer(y_handle, (n,), "float32")
        for i in range(n):
            with T.sblock("y"):
                row = T.axis.spatial(n, i)
                y[row] = T.if_then_else(row < n - T.int64(1), x[row], T.float32(0))

    assert set(rule_of(shifted).whole) == {0}


def test_copies_for_the_extents_of_shards() -> None:
    """Intermediate buffers and loops change with the operands."""
    softmax = legalized(op.nn.softmax, x=(4, 6))
    local = PrimFuncAxes(softmax).for_extents([(2, 6), (2, 6)])
    tvm.ir.assert_structural_equal(
        local.without_attr("global_symbol"),
        legalized(op.nn.softmax, x=(2, 6)).without_attr("global_symbol"),
        map_free_vars=True,
    )


def test_two_calls_share_a_copy() -> None:
    mesh = Mesh({"tp": 2})

    def result(emit: Any, x: Any, w: Any) -> Any:
        xs, ws = (emit(place(each, mesh, {"tp": Shard(0)})) for each in (x, w))
        return emit(relax.Tuple([emit(op.exp(xs)), emit(op.exp(ws))]))

    mod = relax.transform.LegalizeOps()(one_function(result, {"x": (4, 6), "w": (4, 6)}))
    lowered = LowerPlacements()(mod)
    names = sorted(str(variable.name_hint) for variable in lowered.get_global_vars())
    assert names == ["main", "tir_exp", "tir_exp_of_rank"]


@pytest.mark.parametrize("name", ["repeat", "split", "concat", "strided_slice", "take", "reshape"])
def test_a_function_with_the_name_of_an_operator(name: str) -> None:
    """Its rule follows from its body, not from its name."""
    mesh = Mesh({"tp": 2})

    @T.prim_func(private=True, s_tir=True)
    def twice(x: T.Buffer((4, 6), "float32"), y: T.Buffer((4, 6), "float32")):
        for i, j in T.grid(4, 6):
            with T.sblock("y"):
                row, column = T.axis.remap("SS", [i, j])
                y[row, column] = x[row, column] * T.float32(2)

    builder = relax.BlockBuilder()
    function = builder.add_func(twice, name)
    x, w = (relax.Var(each, relax.TensorType((4, 6), "float32")) for each in "xw")
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        y = builder.emit(relax.call_tir(function, [builder.emit(op.add(x, w))], w.ty))
        builder.emit_func_output(builder.emit(place(y, mesh, {"tp": Shard(1)})))
    made = parallelize(builder.get(), {}, 2)
    assert made.shards["w"].placements == (Shard(1),)
    assert made.collectives == {}


def test_shards_that_a_primfunc_does_not_take_are_refused() -> None:
    mesh = Mesh({"tp": 3})

    def result(emit: Any, x: Any) -> Any:
        return emit(op.exp(emit(place(x, mesh, {"tp": Shard(0)}))))

    mod = relax.transform.LegalizeOps()(one_function(result, {"x": (4, 6)}))
    with pytest.raises(TransformError, match="compiled for an extent of 4, which is no multiple"):
        LowerPlacements()(mod)
