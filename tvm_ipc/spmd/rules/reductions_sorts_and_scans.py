# SPDX-License-Identifier: Apache-2.0
"""Sharding rules of operators along an axis: reductions, sorts, scans and searches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from operator import mul
from typing import Any, Final

from tvm import relax, tirx

from tvm_ipc.comm import Placement
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.comm.placements import reduces
from tvm_ipc.spmd.rules.axis_label_rule import Labels, LocalCall, Rule, all_partial_sums, needs_all
from tvm_ipc.spmd.rules.operation import Operation, axes_of, axis_of

#: The reduction that combines the partial results of the ranks, by operator.
_REDUCTIONS: Final = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "prod": "prod"}


def _axes(op: Operation) -> tuple[Labels, set[int], Labels]:
    """Return the labels of the operand, the labels that are reduced, and those of the result."""
    axes = set(axes_of(op.attrs.axis, op.ndim()))
    if op.attrs.keepdims:
        return op.labels, axes, tuple(None if axis in axes else axis for axis in op.labels)
    return op.labels, axes, tuple(axis for axis in op.labels if axis not in axes)


def _reduction(op: Operation) -> Rule:
    labels, axes, result = _axes(op)
    reduction = _REDUCTIONS[op.name]

    def linear(placements: Sequence[Placement]) -> bool:
        return str(placements[0]) == f"P[{reduction}]"

    mean = op.name == "mean"
    # TVM has no reduction kernels for bool.
    if (
        not reduces(reduction, op.dtype())
        or op.dtype() == "bool"
        or (mean and "float" not in op.dtype())
    ):
        return Rule((labels,), (result,), whole=needs_all(*axes), partial_linear=linear)
    count = reduce(mul, [op.dims()[axis] for axis in sorted(axes)], tirx.IntImm("int64", 1))

    def local(local_call: LocalCall) -> relax.Expr:
        copies = prod(
            division.copies(local_call.workers[label])
            for label, division in local_call.divisions.items()
            if label in axes and division is not None
        )
        if not any(label in axes for label in local_call.workers) or (copies == 1 and not mean):
            return local_call.call
        attrs = op.attrs
        total = local_call.emit(
            relax.op.sum(local_call.call.args[0], attrs.axis, bool(attrs.keepdims))
        )
        divisor = count * copies if mean else copies
        return relax.op.divide(total, _scalar(local_call, divisor, op.dtype()))

    return Rule(
        (labels,),
        (result,),
        reduced=dict.fromkeys(axes, reduction),
        replica_safe=reduction in ("max", "min") or (reduction == "sum" and "float" in op.dtype()),
        partial_linear=linear,
        local=local if reduction == "sum" else None,
    )


def _scalar(local_call: LocalCall, value: Any, dtype: str) -> relax.Expr:
    """Return an integer, which may be symbolic, as a 0-d tensor."""
    number = constant(value)
    if number is not None:
        return relax.const(number, dtype)
    vector = local_call.emit(relax.op.shape_to_tensor(relax.ShapeExpr([value])))
    return local_call.emit(relax.op.astype(local_call.emit(relax.op.reshape(vector, ())), dtype))


def _whole_axes(op: Operation) -> Rule:
    """Return the rule of a statistic that partial results cannot be combined to.

    `decompositions` expresses variance and deviation by means if the axis is sharded.
    """
    labels, axes, result = _axes(op)
    return Rule((labels,), (result,) * len(op.results), whole=needs_all(*axes))


def _along_whole_axis(op: Operation) -> Rule:
    """Return the rule of an operator that needs all of one axis, which results may lack."""
    labels = result = op.labels
    if op.attrs.axis is None and len(labels) != 1:
        unlabelled: Labels = (None,) * len(op.result_dims())
        return Rule((labels,), (unlabelled,) * len(op.results), whole=needs_all(*labels))
    axis = axis_of(op.attrs.axis or 0, len(labels))
    if len(op.result_dims()) < len(labels):
        result = (*labels[:axis], *labels[axis + 1 :])
    return Rule(
        (labels,),
        (result,) * len(op.results),
        whole=needs_all(axis),
        partial_linear=all_partial_sums if op.name == "cumsum" else (lambda _: False),
        preserves_zeros=all if op.name in ("cumsum", "cumprod", "sort") else (lambda _: False),
    )


def _bucketize(op: Operation) -> Rule:
    boundaries = op.ndim()
    return Rule((op.labels, (boundaries,)), (op.labels,), whole=needs_all(boundaries))


RULES: Final = {
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(("variance", "std", "median"), _whole_axes),
    "bucketize": _bucketize,
    **dict.fromkeys(
        ("argmax", "argmin", "sort", "argsort", "topk", "cumsum", "cumprod"), _along_whole_axis
    ),
}
