# SPDX-License-Identifier: Apache-2.0
"""Where operands go that do not meet: the way that moves the fewest bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Final

import numpy as np
import tvm
from tvm import relax

from tvm_ipc.comm import Mesh, Partial, Replica, Shard
from tvm_ipc.comm.extents import constant, item_bytes
from tvm_ipc.comm.operator import dtype_of, extents
from tvm_ipc.comm.placements import Placements
from tvm_ipc.transform.placements.placed import is_whole
from tvm_ipc.transform.rules.operation import operation_of
from tvm_ipc.transform.rules.rule import Choice, Decided, Refusal, Rule, placed_by
from tvm_ipc.transform.rules.table import rule_of

#: What a symbolic extent counts as.
TYPICAL: Final = 128


def rule_for(call: relax.Call, ty: relax.Type) -> Rule | None:
    """Return the rule of a call with a result of a type, None if there is none."""
    try:
        operation = operation_of(call, ty)
        return None if operation is None else rule_of(operation)
    except Refusal:
        return None


def cheapest(
    mesh: Mesh,
    rule: Rule,
    operands: Sequence[relax.Expr],
    found: Sequence[Placements],
    made: relax.Type,
) -> Decided:
    """Return where operands go if that moves the fewest bytes.

    Parameters
    ----------
    mesh, rule : of the ranks, and of the operator.
    operands : of it, and where they are found.
    made : the type of the results.
    """
    replicas: Placements = (Replica(),) * len(mesh.axes)
    names = [str(x) for x in operands]
    choices: list[list[Choice]] = []
    for index, workers in enumerate(mesh.axes.values()):
        there = rule.divided_by([one[index] for one in found], workers)
        allowed: list[Choice] = [
            (label, division)
            for label, division in there
            if label is not None and not rule.why_not(label, workers, division)
        ]
        choices.append([*allowed, None])
    best: tuple[float, Decided] | None = None
    for of_axes in product(*choices):
        try:
            decided = placed_by(mesh, rule, names, found, of_axes)
        except Refusal:
            continue
        moves = zip(operands, found, decided.operands, strict=True)
        cost = sum(_bytes(x.ty) * _share(mesh, a, b) for x, a, b in moves)
        results = made.fields if isinstance(made, relax.TupleType) else [made]
        cost += sum(
            _bytes(ty) * _share(mesh, placed, replicas)
            for ty, placed in zip(results, decided.results, strict=True)
            if any(isinstance(one, Partial) for one in placed)
        )
        if best is None or cost < best[0]:
            best = cost, decided
    assert best is not None, "with nothing divided every operator works"
    return best[1]


def _share(mesh: Mesh, source: Placements, target: Placements) -> float:
    """Return which share of a tensor a rank receives when it is placed elsewhere."""
    total = 0.0
    for workers, one, other in zip(mesh.axes.values(), source, target, strict=True):
        if one == other or is_whole(one):
            continue
        share = (workers - 1) / workers
        if isinstance(one, Partial) and isinstance(other, Replica):
            share *= 2
        elif isinstance(one, Shard) and isinstance(other, Shard):
            share /= workers
        total += share
    return total


def _bytes(ty: relax.TensorType) -> float:
    dims = [constant(extent) for extent in extents(ty) or []]
    count = np.prod([TYPICAL if number is None else number for number in dims], dtype=float)
    return float(count) * item_bytes(tvm.DataType(dtype_of(ty) or "float32"))
