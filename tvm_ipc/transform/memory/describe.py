# SPDX-License-Identifier: Apache-2.0
"""A plan as the report of passes has it: names and numbers, no IR."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvm_ipc.transform.ir.live_ranges import live_range
from tvm_ipc.transform.ir.program import Step
from tvm_ipc.transform.ir.roots import Allocation
from tvm_ipc.transform.memory.barriers import GroupKey
from tvm_ipc.transform.memory.packing import Item, most_live
from tvm_ipc.transform.memory.plan import Plan, Tensor, describe
from tvm_ipc.transform.memory.sizes import Size, plain
from tvm_ipc.transform.memory.transfers import computes, transfers
from tvm_ipc.transform.report import Decision, Event, FunctionPlan, PlannedStorage, PlannedTensor

PASS = "StaticPlanBlockMemory"


def decisions(plan: Plan) -> list[Decision]:
    """Return what was decided about each exit barrier, in the order of the program."""
    found: list[tuple[int, str, str]] = []
    for step, candidate in plan.without_barrier.items():
        meeting = _meeting(candidate.meeting)
        reason = f"its input stays live until {meeting}, which every path passes"
        found.append((step.index, "barrier left out", reason))
    found += [(step.index, "barrier kept", why) for step, why in plan.with_barrier.items()]
    program = plan.facts.program
    return [
        Decision(
            PASS,
            program.name,
            str(program.events[index].collective),
            verdict,
            reason,
        )
        for index, verdict, reason in sorted(found)
    ]


def function_plan(plan: Plan) -> FunctionPlan:
    """Return the storages, tensors and events of a plan."""
    program = plan.facts.program
    number = {storage: index for index, storage in enumerate(plan.storages)}
    groups: dict[GroupKey, list[Item]] = {}
    for tensor in plan.tensors.values():
        if tensor.allocation.kept is None and not tensor.allocation.returned:
            item = Item(tensor.size.factor, live_range(tensor.allocation))
            groups.setdefault(tensor.group, []).append(item)
    bounds: dict[str, int] = {}
    for (scope, _, _), items in groups.items():
        bounds[scope] = bounds.get(scope, 0) + most_live(items)
    symbolic = {scope for scope, _, unit in groups if unit != 0}
    return FunctionPlan(
        program.name,
        tuple(
            PlannedStorage(
                f"storage{index or ''}",
                storage.scope,
                _bytes(storage.size),
                _text(plan, storage.size),
            )
            for storage, index in number.items()
        ),
        tuple(
            _tensor(plan, allocation, number)
            for allocation in plan.facts.allocations
            if describe(plan.sizes, allocation) is not None
        ),
        tuple(_event(plan, step, index) for index, step in enumerate(program.events)),
        transfers(program),
        {scope: bound for scope, bound in bounds.items() if scope not in symbolic},
    )


def _tensor(plan: Plan, allocation: Allocation, number: dict[Any, int]) -> PlannedTensor:
    tensor: Tensor | None = describe(plan.sizes, allocation)
    assert tensor is not None
    live = live_range(allocation)
    last = live.last
    if allocation.kept is not None or allocation.returned:
        last = max(last, len(plan.facts.program.events) - 1)
    storage, offset = plan.place.get(allocation, (None, 0))
    until = plan.peers_until.get(allocation)
    return PlannedTensor(
        allocation.name,
        tensor.scope,
        tensor.dtype,
        _bytes(tensor.size),
        _text(plan, tensor.size),
        -1 if storage is None else number[storage],
        plan.sizes.text(offset, tensor.size.unit),
        live.first,
        last,
        None if until is None else until[0],
    )


def _event(plan: Plan, step: Step, index: int) -> Event:
    if step.branches and index == step.entry:
        return Event(f"if {_name(step.value.cond)}:")
    collective = step.collective
    barrier = None
    if step in plan.without_barrier:
        barrier = "left out"
    elif step in plan.with_barrier:
        barrier = "kept"
    text = f"{step.var.name} = {_expression(step)}"
    meeting = None if collective is None else str(collective)
    return Event(text, meeting, barrier, computes(step))


def _expression(step: Step) -> str:
    value = step.value
    if step.branches:
        return "what the branch gives"
    if isinstance(value, relax.Call):
        op = value.op
        if isinstance(op, tvm.ir.Op):
            name = str(op.name).removeprefix("relax.")
        elif isinstance(op, relax.ExternFunc):
            name = str(op.global_symbol)
        else:
            name = _name(op)
        return f"{name}({', '.join(_name(argument) for argument in value.args)})"
    return _name(value)


def _name(expr: Any) -> str:
    if isinstance(expr, tvm.ir.GlobalVar):
        return str(expr.name_hint)
    if isinstance(expr, tvm.ir.Var):
        return str(expr.name)
    if isinstance(expr, relax.Tuple):
        return f"({', '.join(_name(part) for part in expr.fields[:])})"
    if isinstance(expr, relax.TupleGetItem):
        return f"{_name(expr.tuple_value)}[{int(expr.index)}]"
    if isinstance(expr, relax.ShapeExpr):
        return f"[{', '.join(plain(extent) for extent in expr.values)}]"
    if isinstance(expr, tvm.ir.StringImm):
        return str(expr.value)
    if isinstance(expr, tvm.ir.GenericConst):
        return str(expr.value) if isinstance(expr.value, tvm.DataType) else "a constant"
    return "a function" if isinstance(expr, relax.Function) else plain(expr)


def _meeting(step: Step) -> str:
    collective = step.collective
    if collective is not None:
        return f"the {collective}"
    if step.branches:
        return f"both branches that give {step.var.name} have met"
    return f"{_name(step.value.op)} has returned"


def _bytes(size: Size) -> int | None:
    return size.factor if size.static else None


def _text(plan: Plan, size: Size) -> str:
    return plan.sizes.text(size.factor, size.unit)
