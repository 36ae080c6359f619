# SPDX-License-Identifier: Apache-2.0
"""Sums, products, means, and what is largest and smallest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from operator import mul
from typing import Any, Final

from tvm import relax, tirx

from tvm_ipc.comm import Placement
from tvm_ipc.comm.extents import constant
from tvm_ipc.comm.placements import reduces
from tvm_ipc.transform.rules.operation import Operation, axes_of
from tvm_ipc.transform.rules.rule import Labels, Part, Rule, needs_all

#: The reduction that makes the result of what ranks have of it.
_REDUCTIONS: Final = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "prod": "prod"}


def _axes(op: Operation) -> tuple[Labels, set[int], Labels]:
    """Return the labels of the operand, those that are reduced, and those of the result."""
    ndim = op.ndim()
    axes = set(axes_of(op.attrs.axis, ndim))
    labels = tuple(range(ndim))
    kept = tuple(axis for axis in labels if axis not in axes)
    if op.attrs.keepdims:
        return labels, axes, tuple(None if axis in axes else axis for axis in labels)
    return labels, axes, kept


def _reducing(op: Operation) -> Rule:
    labels, axes, result = _axes(op)
    reduction = _REDUCTIONS[op.name]

    def linear(here: Sequence[Placement]) -> bool:
        return str(here[0]) == f"P[{reduction}]"

    mean = op.name == "mean"
    # Of truth values TVM has no such kernel.
    if (
        not reduces(reduction, op.dtype())
        or op.dtype() == "bool"
        or (mean and "float" not in op.dtype())
    ):
        return Rule((labels,), (result,), whole=needs_all(*axes), keeps=linear)
    count = reduce(mul, [op.dims()[axis] for axis in sorted(axes)], tirx.IntImm("int64", 1))

    def local(part: Part) -> relax.Expr:
        copies = prod(
            division.copies(part.workers[label])
            for label, division in part.divisions.items()
            if label in axes and division is not None
        )
        if not any(label in axes for label in part.workers) or (copies == 1 and not mean):
            return part.call
        attrs = op.attrs
        total = part.emit(relax.op.sum(part.call.args[0], attrs.axis, bool(attrs.keepdims)))
        times = count * copies if mean else copies
        return relax.op.divide(total, _scalar(part, times, op.dtype()))

    return Rule(
        (labels,),
        (result,),
        reduced=dict.fromkeys(axes, reduction),
        counts_copies=reduction in ("max", "min") or (reduction == "sum" and "float" in op.dtype()),
        keeps=linear,
        local=local if reduction == "sum" else None,
    )


def _scalar(part: Part, value: Any, dtype: str) -> relax.Expr:
    """Return an integer, which may be symbolic, as a tensor without axes."""
    number = constant(value)
    if number is not None:
        return relax.const(number, dtype)
    vector = part.emit(relax.op.shape_to_tensor(relax.ShapeExpr([value])))
    return part.emit(relax.op.astype(part.emit(relax.op.reshape(vector, ())), dtype))


def _of_all(op: Operation) -> Rule:
    """What is no reduction of what ranks have: it is made of means where an axis is divided."""
    labels, axes, result = _axes(op)
    return Rule((labels,), (result,) * len(op.results), whole=needs_all(*axes))


RULES: Final = {
    **dict.fromkeys(_REDUCTIONS, _reducing),
    **dict.fromkeys(("variance", "std", "median"), _of_all),
}
