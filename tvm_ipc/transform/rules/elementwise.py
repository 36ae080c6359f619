# SPDX-License-Identifier: Apache-2.0
"""Operators element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tvm_ipc.comm import Partial, Placement
from tvm_ipc.comm.extents import constant
from tvm_ipc.comm.operator import dtype_of
from tvm_ipc.transform.rules.operation import Operation, aligned, axis_of
from tvm_ipc.transform.rules.rule import Labels, Rule

#: One operand, element by element; zero stays zero.
_OF_ZERO_ZERO: Final = (
    *("abs", "asin", "asinh", "astype", "atan", "ceil", "erf", "floor", "negative", "nn.gelu"),
    *("nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.selu", "nn.silu", "round", "sign", "sin"),
    *("sinh", "sqrt", "square", "tan", "tanh", "trunc"),
)
#: One operand, which stays as it is, or gives its shape alone.
_LIKE_ZERO: Final = ("hint_on_device", "wrap_param", "zeros_like")
_LIKE: Final = (*_LIKE_ZERO, "ones_like", "full_like")
#: One operand, element by element.
UNARY: Final = (
    *_OF_ZERO_ZERO,
    *("acos", "acosh", "atanh", "bitwise_not", "clip", "cos", "cosh", "exp", "isfinite", "isinf"),
    *("isnan", "log", "logical_not", "nn.softplus", "rsqrt", "sigmoid"),
)
#: Several operands, element by element, which are repeated along axes that they lack.
_OF_ZEROS_ZERO: Final = ("add", "subtract", "multiply", "maximum", "minimum")
BROADCASTING: Final = (
    *_OF_ZEROS_ZERO,
    *("atan2", "bitwise_and", "bitwise_or", "bitwise_xor", "divide", "equal", "floor_divide"),
    *("floor_mod", "greater", "greater_equal", "left_shift", "less", "less_equal"),
    *("log_add_exp", "logical_and", "logical_or", "logical_xor", "mod", "not_equal", "power"),
    *("right_shift", "where"),
)
#: Of whole numbers these stop the process where the divisor is 0, as it is beyond the end.
_DIVISIONS: Final = ("divide", "floor_divide", "floor_mod", "mod")
#: With which reduction an operator can be exchanged, if all operands are partial.
_EXCHANGED: Final = {
    "add": "sum",
    "subtract": "sum",
    "negative": "sum",
    "maximum": "max",
    "minimum": "min",
    "multiply": "prod",
}
#: The result is the operand.
_MOVED_AS_THEY_ARE: Final = ("hint_on_device", "wrap_param")


def elementwise(op: Operation) -> Rule:
    """Return the rule of an operator element by element."""
    dims = op.made()
    floats = "float" in op.dtype()
    name = op.name

    def keeps(here: Sequence[Placement]) -> bool:
        partial = [one for one in here if isinstance(one, Partial)]
        if name in _MOVED_AS_THEY_ARE:
            return True
        if len(partial) == len(here):
            return all(one.reduction == _EXCHANGED.get(name) for one in partial)
        if name == "where":  # the condition chooses among parts of sums, or of anything
            return str(here[0]) == "R" and here[1] == here[2]
        linear = name == "multiply" or (name == "divide" and floats and here[0] in partial)
        alone = len(partial) == 1 and all(str(one) == "R" for one in here if one not in partial)
        return linear and alone and partial[0].reduction == "sum"

    def zeros(have: Sequence[bool]) -> bool:
        if name == "where":
            return all(have[1:])
        return name in (*_OF_ZERO_ZERO, *_OF_ZEROS_ZERO, *_LIKE_ZERO) and all(have)

    divides_integers = name in _DIVISIONS and "float" not in dtype_of(op.operands[1])
    return Rule(
        tuple(aligned(op.dims(k), dims) for k in range(len(op.operands))),
        (tuple(range(len(dims))),),
        keeps=keeps,
        zeros=zeros,
        beyond={1: 1} if divides_integers else {},
    )


def along_an_axis(op: Operation) -> Rule:
    """Return the rule of one whose other operands are vectors along an axis of the first one."""
    ndim = op.ndim()
    axis = axis_of(op.attrs.axis, ndim)

    def vector(operand: int) -> Labels:
        dims = op.dims(operand)
        repeated = not dims or (constant(dims[0]) == 1 != constant(op.dims()[axis]))
        return (None if repeated else axis,) if dims else ()

    labels = tuple(range(ndim))
    others = [vector(k) for k in range(1, len(op.operands))]
    return Rule((labels, *others), (labels,))


RULES: Final = {
    **dict.fromkeys((*UNARY, *BROADCASTING, *_LIKE), elementwise),
    **dict.fromkeys(("quantize", "dequantize", "nn.prelu"), along_an_axis),
}
