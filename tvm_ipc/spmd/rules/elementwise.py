# SPDX-License-Identifier: Apache-2.0
"""Sharding rules of elementwise operators, and of others that keep the axes of their operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from tvm_ipc.analysis.elementwise_ops import (
    BROADCASTING,
    UNARY,
    ZERO_PRESERVING_BROADCASTING,
    ZERO_PRESERVING_UNARY,
)
from tvm_ipc.comm import Partial, Placement
from tvm_ipc.comm.collective_relax_op import dtype_of
from tvm_ipc.comm.extent_arithmetic import constant
from tvm_ipc.spmd.rules.axis_label_rule import Labels, Rule, needs_all
from tvm_ipc.spmd.rules.operation import Operation, aligned

#: Operators with one operand, which return it, or read only its shape.
_LIKE_ZERO: Final = ("hint_on_device", "wrap_param", "zeros_like")
_LIKE: Final = (*_LIKE_ZERO, "ones_like", "full_like")
#: Integer division by 0 aborts the process, and the padding of a divisor may be 0.
_DIVISIONS: Final = ("divide", "floor_divide", "floor_mod", "mod")
#: The reduction that commutes with an operator if all of its operands are partial.
_COMMUTES_WITH: Final = {
    "add": "sum",
    "subtract": "sum",
    "negative": "sum",
    "maximum": "max",
    "minimum": "min",
    "multiply": "prod",
}
#: Operators that return their operand.
_IDENTITIES: Final = ("hint_on_device", "wrap_param")


def elementwise(op: Operation) -> Rule:
    """Return the rule of an elementwise operator."""
    dims = op.result_dims()
    floats = "float" in op.dtype()
    name = op.name

    def is_partial_linear(placements: Sequence[Placement]) -> bool:
        partial = [placement for placement in placements if isinstance(placement, Partial)]
        if name in _IDENTITIES:
            return True
        if len(partial) == len(placements):
            return all(placement.reduction == _COMMUTES_WITH.get(name) for placement in partial)
        if name == "where":  # a replicated condition selects from any kind of partial values
            return str(placements[0]) == "R" and placements[1] == placements[2]
        linear = name == "multiply" or (name == "divide" and floats and placements[0] in partial)
        others = [placement for placement in placements if placement not in partial]
        one_partial = len(partial) == 1 and all(str(placement) == "R" for placement in others)
        return linear and one_partial and partial[0].reduction == "sum"

    def preserves_zeros(zeros: Sequence[bool]) -> bool:
        if name == "where":
            return all(zeros[1:])
        preserving = (*ZERO_PRESERVING_UNARY, *ZERO_PRESERVING_BROADCASTING, *_LIKE_ZERO)
        return name in preserving and all(zeros)

    is_integer_division = name in _DIVISIONS and "float" not in dtype_of(op.operands[1])
    return Rule(
        tuple(aligned(op.dims(k), dims) for k in range(len(op.operands))),
        (tuple(range(len(dims))),),
        partial_linear=is_partial_linear,
        preserves_zeros=preserves_zeros,
        padding={1: 1} if is_integer_division else {},
    )


def along_an_axis(op: Operation) -> Rule:
    """Return the rule of an operator with a tensor and vectors along one of its axes."""
    axis = op.axis

    def vector(operand: int) -> Labels:
        dims = op.dims(operand)
        repeated = not dims or (constant(dims[0]) == 1 != constant(op.dims()[axis]))
        return (None if repeated else axis,) if dims else ()

    others = [vector(k) for k in range(1, len(op.operands))]
    return Rule((op.labels, *others), (op.labels,))


def same_axes(
    whole: Callable[[Operation], Iterable[int]], **behavior: Any
) -> Callable[[Operation], Rule]:
    """Return the rules of operators whose operands and result have the same axes.

    Parameters
    ----------
    whole : returns the axes that must not be sharded.
    behavior : further arguments of `Rule`.
    """

    def rule(op: Operation) -> Rule:
        operands = (op.labels,) * len(op.operands)
        return Rule(operands, (op.labels,), whole=needs_all(*whole(op)), **behavior)

    return rule


RULES: Final = {
    **dict.fromkeys((*UNARY, *BROADCASTING, *_LIKE), elementwise),
    **dict.fromkeys(("quantize", "dequantize", "nn.prelu"), along_an_axis),
}
