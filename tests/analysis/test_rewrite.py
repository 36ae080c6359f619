# SPDX-License-Identifier: Apache-2.0
"""Walks through the bindings of functions, and other bindings in their place."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_ipc.analysis.walk_and_rewrite_bindings import (
    begin_with,
    calls,
    change_functions,
    rewrite,
    walk,
    with_value,
)


@I.ir_module
class Nested:
    """Two blocks; in the second one branches and a local function."""

    @R.function
    def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")) -> R.Tensor((4,), "float32"):
        with R.dataflow():
            a = R.add(x, x)
            R.output(a)

        @R.function
        def inner(p: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            q = R.exp(p)
            return q

        if c:
            d = R.multiply(a, x)
            e = R.tanh(d)
        else:
            e = R.negative(a)
        m = R.match_cast(e, R.Tensor((4,), "float32"))
        r = inner(m)
        return r


MAIN = Nested["main"]


def name(value: Any) -> str:
    return str(value.op.name).removeprefix("relax.") if isinstance(value.op, tvm.ir.Op) else "?"


def replace(what: str, by: str) -> Any:
    """Return a change of one operator into another one."""

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        if not isinstance(value, relax.Call) or name(value) != what:
            return None
        op = tvm.ir.Op.get(f"relax.{by}")
        return [with_value(binding, relax.Call(op, value.args, ret_ty=value.ty))]

    return change


def parts(function: relax.Function) -> tuple[Any, Any, Any, Any]:
    """Return the first block, the local function and both branches."""
    first, second = function.body.blocks
    literal = next(b.value for b in second.bindings if isinstance(b.value, relax.Function))
    chosen = next(b.value for b in second.bindings if isinstance(b.value, relax.If))
    return first, literal, chosen.true_branch, chosen.false_branch


def test_every_binding_and_every_result_is_walked_through() -> None:
    names = [name(call) for call in calls(MAIN)]
    assert names == ["add", "exp", "multiply", "tanh", "negative", "?"]
    found = list(walk(MAIN))
    assert [binding is None for binding, _ in found].count(True) == 4
    assert all(binding.value.same_as(value) for binding, value in found if binding is not None)
    assert found[-1][0] is None
    assert found[-1][1].same_as(MAIN.body.body)


def test_a_function_in_which_nothing_changes_is_itself() -> None:
    assert rewrite(MAIN, lambda _binding, _value: None) is MAIN
    assert change_functions(Nested, lambda _, function: function) is Nested


@pytest.mark.parametrize(
    ("what", "changed"), [("add", 0), ("exp", 1), ("multiply", 2), ("negative", 3)]
)
def test_what_does_not_change_stays_the_object_that_it_was(what: str, changed: int) -> None:
    result = rewrite(MAIN, replace(what, "subtract" if what in ("add", "multiply") else "sin"))
    names = [name(call) for call in calls(result)]
    assert what not in names
    assert len(names) == 6
    for place, (before, after) in enumerate(zip(parts(MAIN), parts(result), strict=True)):
        assert after.same_as(before) is (place != changed)
    relax.analysis.well_formed(tvm.IRModule({"main": result}))


def test_a_binding_may_stand_among_those_that_replace_it() -> None:
    before = [relax.VarBinding(relax.Var("_", MAIN.params[0].ty), MAIN.params[0])]

    def change(binding: relax.Binding, value: relax.Expr) -> list[relax.Binding] | None:
        if isinstance(value, relax.If):
            return [*before, binding]
        return replace("tanh", "sin")(binding, value)

    result = rewrite(MAIN, change)
    bindings = list(result.body.blocks[1].bindings)
    assert bindings[1].same_as(before[0])
    assert [name(call) for call in calls(result)] == [
        "add",
        "exp",
        "multiply",
        "sin",
        "negative",
        "?",
    ]


def test_bindings_are_taken_out_and_cast_again() -> None:
    def change(binding: relax.Binding, _: relax.Expr) -> list[relax.Binding] | None:
        if isinstance(binding, relax.MatchCast):
            return [with_value(binding, MAIN.params[0])]
        return [] if binding.var.name == "d" else None

    result = rewrite(MAIN, change)
    assert [name(call) for call in calls(result)] == ["add", "exp", "tanh", "negative", "?"]
    casts = [one for one, _ in walk(result) if isinstance(one, relax.MatchCast)]
    assert [cast.value.name for cast in casts] == ["x"]


def test_only_functions_of_the_kind_are_changed_and_the_module_stays() -> None:
    changed = change_functions(Nested, lambda _, one: rewrite(one, replace("add", "subtract")))
    assert name(next(iter(calls(changed["main"])))) == "subtract"
    assert name(next(iter(calls(Nested["main"])))) == "add"
    assert change_functions(Nested, lambda _, one: None, tvm.tirx.PrimFunc) is Nested


def test_more_bindings_come_before_the_first() -> None:
    first = relax.VarBinding(relax.Var("_", MAIN.params[0].ty), MAIN.params[0])
    result = begin_with(MAIN, [first])
    assert next(iter(walk(result)))[0].same_as(first)
    assert len(list(walk(result))) == len(list(walk(MAIN))) + 1
