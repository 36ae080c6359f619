# SPDX-License-Identifier: Apache-2.0
"""The bindings of a function in order, where their variables are used, and edits of them."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_ipc.analysis.program_order import Step, ancestor, common_region, exclusive, linearize
from tvm_ipc.analysis.uses import Uses, binds
from tvm_ipc.analysis.walk_and_rewrite_bindings import Edits, bindings_of, has_dataflow

F4 = R.Tensor((4,), "float32")


@I.ir_module
class Program:
    """An if in an if, after a dataflow block."""

    @R.function(pure=False)
    def main(x: F4, c: R.Tensor((), "bool")) -> F4:
        with R.dataflow():
            a = R.add(x, x)
            b = R.exp(a)
            R.output(b)
        written = R.call_packed("write", b, ty_args=(F4,))  # noqa: F841
        if c:
            d = R.multiply(b, x)
            if c:
                e = R.tanh(d)
            else:
                e = R.negative(d)
            g = e
        else:
            g = R.abs(b)
        pair = (g, b)
        last = pair[0]
        return last


MAIN = Program["main"]
PROGRAM = linearize("main", MAIN)
USES = Uses(PROGRAM)
STEPS = {str(var.name): step for var, step in USES.bound.items()}


def names(steps: list[Step]) -> list[str]:
    return [str(step.var.name) if step.var is not None else "result" for step in steps]


def users(name: str) -> list[str]:
    return names(USES.users[STEPS[name].var])


def test_events_are_in_order_and_an_if_has_two():
    assert [step.entry for step in USES.bound.values()] == sorted(
        step.entry for step in USES.bound.values()
    )
    inner = STEPS["e"]
    assert PROGRAM.points[inner.entry] is PROGRAM.points[inner.index] is inner
    assert [region.end - region.begin for region in inner.branches] == [0, 0]
    assert inner.index == inner.branches[1].end + 1


def test_blocks_of_bindings():
    assert [STEPS[name].in_dataflow for name in ("a", "b", "written")] == [True, True, False]
    assert STEPS["a"].shares_block(STEPS["b"])
    assert not STEPS["b"].shares_block(STEPS["written"])
    then, otherwise = STEPS["g"].branches
    assert not PROGRAM.steps[then][0].shares_block(PROGRAM.steps[otherwise][0])


def test_users():
    assert users("a") == ["b"]
    assert users("b")[:2] == ["written", "d"] and users("b")[-1] == "pair"
    assert names(USES.users[MAIN.params[1]]) == ["g", "e"]  # the conditions
    assert users("pair") == ["last"]
    assert users("last") == ["result"]
    (result,) = USES.users[STEPS["last"].var]
    assert result.entry == PROGRAM.body.end + 1


def test_bindings_of_variables():
    assert USES.binding_of(STEPS["a"].var) is STEPS["a"]
    assert USES.binding_of(MAIN.params[0]) is None
    assert USES.binding_of(STEPS["a"].value) is None
    assert binds(STEPS["a"], "relax.exp", "relax.add")
    assert not binds(STEPS["a"], "relax.exp")


def test_writes():
    event = STEPS["written"].entry
    assert USES.written(0, event + 1) and USES.written(event, event + 1)
    assert not USES.written(0, event) and not USES.written(event + 1, PROGRAM.body.end)


def test_regions():
    outer, inner = STEPS["g"].branches, STEPS["e"].branches
    assert common_region([*inner]) is outer[0]
    assert common_region([inner[0], outer[1]]) is PROGRAM.body
    assert common_region([inner[0]]) is inner[0]
    assert exclusive(inner[0], inner[1]) and exclusive(inner[0], outer[1])
    assert not exclusive(inner[0], outer[0]) and not exclusive(inner[0], inner[0])
    (tanh, *_) = PROGRAM.steps[inner[0]]
    assert ancestor(tanh, PROGRAM.body) is STEPS["g"]
    assert ancestor(tanh, outer[0]) is STEPS["e"]
    assert ancestor(tanh, inner[0]) is tanh
    assert PROGRAM.body.result.same_as(MAIN.body.body)


def test_edits():
    one, two, three = (
        relax.VarBinding(relax.Var(name, MAIN.params[0].ty), MAIN.params[0])
        for name in ("one", "two", "three")
    )
    assert Edits().apply(MAIN).same_as(MAIN)
    edits = Edits()
    edits.insert_before(STEPS["written"].var, [one])
    edits.insert_before(STEPS["written"].var, [two])
    edits.insert_after(STEPS["pair"].var, [three])
    edits.replace(STEPS["d"].var, [])
    edits.replace(STEPS["e"].var, [])
    assert edits.replaces(STEPS["d"].var) and not edits.replaces(STEPS["pair"].var)
    program = linearize("main", edits.apply(MAIN))
    changed = list(Uses(program).bound)
    assert [str(var.name) for var in changed if var not in USES.bound] == ["one", "two", "three"]
    order = [str(var.name) for var in changed]
    assert order.index("two") + 1 == order.index("written")
    assert order.index("three") - 1 == order.index("pair")
    assert "d" not in order and "e" not in order


@pytest.mark.parametrize("where", ["body", "branch", "local function", "nowhere"])
def test_dataflow_blocks_are_found(where: str):
    dataflow = "with R.dataflow():\n{0}    b = R.exp(x)\n{0}    R.output(b)"
    plain = "b = R.exp(x)"
    texts = {name: dataflow if name == where else plain for name in ("body", "branch")}
    local = dataflow if where == "local function" else plain
    module = tvm.script.from_source(f"""
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")):
        @R.function
        def inner(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            {local.format(" " * 12)}
            return b
        if c:
            {texts["branch"].format(" " * 12)}
            y = b
        else:
            y = x
        {texts["body"].format(" " * 8)}
        return y
""")
    assert has_dataflow(module["main"].body) == (where != "nowhere")


def test_bindings_of_a_sequence_are_its_own():
    assert [str(binding.var.name) for binding in bindings_of(MAIN.body)] == [
        *("a", "b", "written", "g", "pair", "last")
    ]
    assert bindings_of(MAIN.params[0]) == []
