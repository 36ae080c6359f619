# SPDX-License-Identifier: Apache-2.0
"""Converts a memory plan to the data of a pass report, which holds names and numbers, no IR."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvm_ipc.analysis.alias_facts import Allocation
from tvm_ipc.analysis.ffi_arrays import as_list
from tvm_ipc.analysis.live_ranges import live_range
from tvm_ipc.analysis.program_order import Step
from tvm_ipc.analysis.shape_algebra import Size, plain
from tvm_ipc.transform.memory_plan.exit_barrier_budget import GroupKey
from tvm_ipc.transform.memory_plan.packing import Item, most_live
from tvm_ipc.transform.memory_plan.plan_function_storages import Plan, Tensor, describe
from tvm_ipc.transform.memory_plan.transfer_events_for_report import computes, transfers
from tvm_ipc.transform.report import Decision, Event, FunctionPlan, PlannedStorage, PlannedTensor
from tvm_ipc.tvm_moved_names import GenericConst, StringImm

PASS = "StaticPlanBlockMemory"


def decisions(plan: Plan) -> list[Decision]:
    """Return the decision about each exit barrier, in the order of the program."""
    verdicts: list[tuple[int, str, str]] = []
    for step, candidate in plan.without_barrier.items():
        substitute = _describe_substitute(candidate.substitute)
        reason = (
            f"nothing overwrites its input before {substitute}, where all workers wait for each "
            "other, and every path through the function gets there"
        )
        verdicts.append((step.index, "barrier left out", reason))
    verdicts += [(step.index, "barrier kept", reason) for step, reason in plan.with_barrier.items()]
    program = plan.facts.program
    return [
        Decision(
            PASS,
            program.name,
            str(program.points[index].collective),
            verdict,
            reason,
        )
        for index, verdict, reason in sorted(verdicts)
    ]


def function_plan(plan: Plan) -> FunctionPlan:
    """Return the storages, tensors and events of a plan."""
    program = plan.facts.program
    index_of = {storage: index for index, storage in enumerate(plan.storages)}
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
                _size_text(plan, storage.size),
            )
            for storage, index in index_of.items()
        ),
        tuple(
            _planned_tensor(plan, allocation, index_of)
            for allocation in plan.facts.allocations
            if describe(plan.sizes, allocation) is not None
        ),
        tuple(_event(plan, step, index) for index, step in enumerate(program.points)),
        transfers(program),
        {scope: bound for scope, bound in bounds.items() if scope not in symbolic},
    )


def _planned_tensor(plan: Plan, allocation: Allocation, index_of: dict[Any, int]) -> PlannedTensor:
    tensor: Tensor | None = describe(plan.sizes, allocation)
    assert tensor is not None
    live = live_range(allocation)
    last = live.last
    if allocation.kept is not None or allocation.returned:
        last = max(last, len(plan.facts.program.points) - 1)
    storage, offset = plan.offset_in.get(allocation, (None, 0))
    read_end = plan.peers_until.get(allocation)
    return PlannedTensor(
        allocation.name,
        tensor.scope,
        tensor.dtype,
        _bytes(tensor.size),
        _size_text(plan, tensor.size),
        -1 if storage is None else index_of[storage],
        plan.sizes.text(offset, tensor.size.unit),
        live.first,
        last,
        None if read_end is None else read_end[0],
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
    return Event(text, None if collective is None else str(collective), barrier, computes(step))


def _expression(step: Step) -> str:
    value = step.value
    if step.branches:
        return "the result of the branch"
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
        return f"({', '.join(_name(field) for field in as_list(expr.fields))})"
    if isinstance(expr, relax.TupleGetItem):
        return f"{_name(expr.tuple_value)}[{int(expr.index)}]"
    if isinstance(expr, relax.ShapeExpr):
        return f"[{', '.join(plain(extent) for extent in expr.values)}]"
    if isinstance(expr, StringImm):
        return str(expr.value)
    if isinstance(expr, GenericConst):
        return str(expr.value) if isinstance(expr.value, tvm.DataType) else "a constant"
    return "a function" if isinstance(expr, relax.Function) else plain(expr)


def _describe_substitute(step: Step) -> str:
    """Return a phrase for the step that replaces an exit barrier."""
    collective = step.collective
    if collective is not None:
        return f"the {collective}"
    if step.branches:
        return f"the if that binds {step.var.name}"
    return f"the call of {_name(step.value.op)}"


def _bytes(size: Size) -> int | None:
    return size.factor if size.static else None


def _size_text(plan: Plan, size: Size) -> str:
    return plan.sizes.text(size.factor, size.unit)
