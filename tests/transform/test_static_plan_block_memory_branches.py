# SPDX-License-Identifier: Apache-2.0
"""StaticPlanBlockMemory: exit barriers where ranks may take different branches of an `if`."""

from __future__ import annotations

import pytest
import tvm

from tests.transform.memory_programs import left_out, prepared
from tvm_ipc.transform import IPCAllReduceRewrite, StaticPlanBlockMemory, collect_report

LEFT_OUT, KEPT = True, False
FUNCTIONS = """
    @R.function(private=True)
    def one(a: R.Tensor((32, 64), "float32")) -> R.Tensor((32, 64), "float32"):
        b = R.ccl.allreduce(R.nn.relu(a), "sum", False)
        return R.ccl.allreduce(R.nn.relu(b), "sum", False)
"""
#: Small and large inputs: small ones are freed first.
SMALL = "R.ccl.allreduce(R.nn.relu(x), 'sum', False)"
OTHER = "R.ccl.allreduce(R.add(x, x), 'sum', False)"
MAX = "R.ccl.allreduce(R.add(x, x), 'max', False)"
OWN = "R.ccl.allreduce(x, 'sum', False)"  #: of memory of the caller
LAST = ["return R.ccl.allreduce(R.add(y, y), 'sum', False)"]


def module(*lines: str) -> tvm.IRModule:
    head = "\n@I.ir_module\nclass Module:" + FUNCTIONS + "    @R.function\n    def main("
    head += 'c: R.Tensor((), "bool"), d: R.Tensor((), "bool"), x: R.Tensor((32, 64), "float32")):\n'
    mod = tvm.script.from_source(head + "".join(f"        {line}\n" for line in lines))
    return prepared(mod, IPCAllReduceRewrite(1))


def branch(condition: str, then: list[str], otherwise: list[str]) -> list[str]:
    return [
        f"if {condition}:",
        *(f"    {line}" for line in then),
        "else:",
        *(f"    {line}" for line in otherwise),
    ]


def planned(*lines: str, budget: int | None = None) -> list[bool]:
    return left_out(StaticPlanBlockMemory(packed=True, barrier_budget=budget)(module(*lines)))


def test_calls_that_match_are_decided_together() -> None:
    both = branch("c", [f"y = {SMALL}"], [f"y = {OTHER}"])
    assert planned(*both, *LAST) == [LEFT_OUT, LEFT_OUT, KEPT]
    # The second branch reads the input again, so that more memory is live there.
    more = [f"a = {OTHER}", "b = R.add(R.add(x, x), a)", "y = R.add(b, a)"]
    uneven = branch("c", [f"y = {SMALL}"], more)
    for budget in (None, 0, 1 << 30):
        first, second, last = planned(*uneven, *LAST, budget=budget)
        assert first is second and last is KEPT


def test_a_call_keeps_its_barrier_where_its_counterpart_does() -> None:
    lines = [*branch("c", [f"y = {SMALL}"], ["y = R.ccl.allreduce(y0, 'sum', False)"]), *LAST]
    lines = [f"y0 = {SMALL}", *lines[:-1], "z = R.add(y, y0)"]
    lines += ["return (R.ccl.allreduce(R.add(z, z), 'sum', False), y0)"]
    _, then, otherwise, _ = planned(*lines)
    assert then is otherwise
    mod = module(*lines)
    with collect_report() as report:
        StaticPlanBlockMemory(packed=True)(mod)
    if then is KEPT:
        reasons = [one.reason for one in report.decisions]
        assert any("matches it in another branch keeps its barrier" in one for one in reasons)


def test_nested_branches_match_too() -> None:
    inner = branch("d", [f"y = {OTHER}"], [f"y = {OWN}"])
    found = planned(*branch("c", [f"y = {SMALL}"], inner), *LAST)
    assert found[:3] in ([KEPT] * 3, [LEFT_OUT] * 3)


@pytest.mark.parametrize("otherwise", ["y = x", f"y = {MAX}"])
def test_branches_that_do_not_match_are_decided_alone(otherwise: str) -> None:
    """All ranks take one of them: nothing in the other one matches."""
    found = planned(*branch("c", [f"y = {SMALL}"], [otherwise]), *LAST)
    assert found == [LEFT_OUT] * (len(found) - 1) + [KEPT]
    twice = branch("c", [f"y = {SMALL}"], ["y = x"]), branch("c", [f"z = {OTHER}"], ["z = y"])
    last = LAST[0].replace("y", "z")
    assert planned(*twice[0], *twice[1], last, budget=1 << 30)[:2] == [LEFT_OUT, LEFT_OUT]


def test_calls_in_branches_of_different_conditions_may_match() -> None:
    """Rank 0 makes the call in the first `if`, and the others in the second one."""
    lines = [
        *branch("c", [f"y = {SMALL}"], ["y = x"]),
        *branch("d", ["z = y"], [f"z = {OTHER}"]),
    ]
    last = LAST[0].replace("y", "z")
    assert planned(*lines, last, budget=1 << 30) == [LEFT_OUT, LEFT_OUT, KEPT]
    # Nobody meets after the second one, so the first one keeps its barrier too.
    assert planned(*lines, "return z") == [KEPT, KEPT]


def test_calls_of_functions_keep_their_barriers() -> None:
    """One branch calls what the other one has inside; a function is planned alone."""
    lines = branch("c", ["y = Module.one(x)"], [f"a = {SMALL}", "b = R.nn.relu(a)"])
    lines += ["    y = R.ccl.allreduce(R.nn.relu(b), 'sum', False)", *LAST]
    mod = StaticPlanBlockMemory(packed=True)(module(*lines))
    assert left_out(mod) == [KEPT] * 3 and left_out(mod, "one") == [KEPT] * 2
    both = branch("c", ["y = Module.one(x)"], ["y = Module.one(R.add(x, x))"])
    assert left_out(StaticPlanBlockMemory(packed=True)(module(*both, *LAST)), "one")[0] is LEFT_OUT


def test_promises_of_the_program_are_taken_back_on_both_sides() -> None:
    def call(send: str) -> str:
        given = f'"tvm_ipc.allreduce", {send}, 0, 0, 3, 1, o'
        return f"_ = R.call_packed({given}, ty_args=(R.Tuple([]),))"

    text = f"""
@I.ir_module
class Module:
    @R.function(pure=False)
    def main(c: R.Tensor((), "bool"), x: R.Tensor((8,), "float32"), o: R.Tensor((8,), "float32")):
        a = R.builtin.alloc_tensor(R.shape([8]), R.dtype("float32"), 0, "ipc_memory")
        _ = R.call_packed("tvm_ipc.copy", x, a, ty_args=(R.Tuple([]),))
        if c:
            {call("a")}
            r = x
        else:
            {call("x")}
            r = x
        return r
"""
    assert left_out(StaticPlanBlockMemory(packed=True)(tvm.script.from_source(text))) == [
        KEPT,
        KEPT,
    ]
