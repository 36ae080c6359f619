# SPDX-License-Identifier: Apache-2.0
"""The rules of Relax operators, those that work on parts of tensors.

Others need all of each tensor: what they are given is replicated, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import tvm
from tvm import relax

from tvm_ipc.comm import Partial, Placement
from tvm_ipc.comm.operator import constant, dtype_of, extents
from tvm_ipc.transform.placements.rules import Labels, Rule

#: One operand, element by element; zero stays zero.
_OF_ZERO_ZERO: Final = (
    *("abs", "asin", "asinh", "astype", "atan", "ceil", "erf", "floor", "negative", "nn.gelu"),
    *("nn.gelu_tanh", "nn.relu", "nn.silu", "round", "sign", "sin", "sinh", "sqrt", "square"),
    *("tan", "tanh", "trunc"),
)
#: One operand, element by element.
UNARY: Final = (
    *_OF_ZERO_ZERO,
    *("acos", "acosh", "atanh", "bitwise_not", "clip", "cos", "cosh", "exp", "isfinite", "isinf"),
    *("isnan", "log", "logical_not", "nn.leakyrelu", "nn.selu", "nn.softplus", "rsqrt", "sigmoid"),
)
#: Several operands, element by element, which are repeated along axes that they lack.
_OF_ZEROS_ZERO: Final = ("add", "subtract", "multiply", "maximum", "minimum")
BROADCASTING: Final = (
    *_OF_ZEROS_ZERO,
    *("atan2", "bitwise_and", "bitwise_or", "bitwise_xor", "divide", "equal", "floor_divide"),
    *("floor_mod", "greater", "greater_equal", "left_shift", "less", "less_equal", "log_add_exp"),
    *("logical_and", "logical_or", "logical_xor", "mod", "not_equal", "power", "right_shift"),
    "where",
)
#: Of whole numbers these stop the process where the divisor is 0, as it is beyond the end.
DIVISIONS: Final = ("divide", "floor_divide", "floor_mod", "mod")
#: With which reduction an operator can be exchanged, if all operands are partial.
_EXCHANGED: Final = {
    "add": "sum",
    "subtract": "sum",
    "negative": "sum",
    "sum": "sum",
    "maximum": "max",
    "minimum": "min",
    "multiply": "prod",
}
#: Along an axis, or some, of which every rank needs all.
_ALONG: Final = ("nn.softmax", "nn.log_softmax")
_NORMS: Final = ("nn.layer_norm", "nn.rms_norm")
_REDUCING: Final = ("sum", "mean", "max", "min", "prod")

_PREFIX: Final = "relax."


def short_name(call: relax.Call) -> str:
    """Return the name of an operator as programs have it after `R.`, "" for other callees."""
    return str(call.op.name).removeprefix(_PREFIX) if isinstance(call.op, tvm.ir.Op) else ""


def tensors_of(call: relax.Call) -> list[int]:
    """Return which arguments of a call are tensors."""
    return [k for k, x in enumerate(call.args) if isinstance(x.ty, relax.TensorType)]


def rule_of(call: relax.Call, result: relax.Type) -> Rule | None:
    """Return what an operator does to axes, None where that is not known."""
    name = short_name(call)
    types = [call.args[k].ty for k in tensors_of(call)]
    make = _RULES.get(name)
    if make is None or not isinstance(result, relax.TensorType):
        return None
    if any(extents(ty) is None for ty in (*types, result)):
        return None
    return make(name, call.attrs, types, result)


def _elementwise(name: str, _attrs: Any, types: Sequence[Any], result: Any) -> Rule:
    dims = extents(result) or []
    floats = "float" in dtype_of(result)

    def keeps(here: Sequence[Placement]) -> bool:
        partial = [one for one in here if isinstance(one, Partial)]
        if len(partial) == len(here):
            return all(one.reduction == _EXCHANGED.get(name) for one in partial)
        linear = name == "multiply" or (name == "divide" and floats and here[0] in partial)
        alone = len(partial) == 1 and all(str(one) == "R" for one in here if one not in partial)
        return linear and alone and partial[0].reduction == "sum"

    operands = tuple(_aligned(extents(ty) or [], dims) for ty in types)
    zeros = name in _OF_ZERO_ZERO or name in _OF_ZEROS_ZERO
    return Rule(operands, tuple(range(len(dims))), keeps=keeps, zeros=zeros)


def _aligned(dims: Sequence[Any], result: Sequence[Any]) -> Labels:
    """Return the labels of an operand whose last axes are those of the result."""
    first = len(result) - len(dims)
    return tuple(
        None if constant(extent) == 1 != constant(result[first + axis]) else first + axis
        for axis, extent in enumerate(dims)
    )


def _matmul(_name: str, _attrs: Any, types: Sequence[Any], result: Any) -> Rule:
    a, b = (extents(ty) or [] for ty in types)
    dims = extents(result) or []
    rows, columns = len(a) > 1, len(b) > 1
    batch = len(dims) - rows - columns
    inner = len(dims)
    of_a = _aligned(a[:-2], dims[:batch]) + ((batch,) if rows else ()) + (inner,)
    of_b = _aligned(b[:-2], dims[:batch]) + (inner,) + ((len(dims) - 1,) if columns else ())

    def keeps(here: Sequence[Placement]) -> bool:
        return sorted(map(str, here)) == ["P[sum]", "R"]

    return Rule((of_a, of_b), tuple(range(len(dims))), summed=frozenset({inner}), keeps=keeps)


def _permute_dims(_name: str, attrs: Any, types: Sequence[Any], _result: Any) -> Rule:
    ndim = int(types[0].ndim)
    axes = range(ndim)[::-1] if attrs.axes is None else [int(axis) % ndim for axis in attrs.axes]
    return Rule((tuple(range(ndim)),), tuple(axes), keeps=lambda _: True, zeros=True)


def _softmax(_name: str, attrs: Any, types: Sequence[Any], _result: Any) -> Rule:
    ndim = int(types[0].ndim)
    labels = tuple(range(ndim))
    return Rule((labels,), labels, whole=frozenset({int(attrs.axis) % ndim}))


def _norm(_name: str, attrs: Any, types: Sequence[Any], _result: Any) -> Rule:
    ndim = int(types[0].ndim)
    labels = tuple(range(ndim))
    axes = tuple(int(axis) % ndim for axis in attrs.axes)
    return Rule((labels, *[axes] * (len(types) - 1)), labels, whole=frozenset(axes))


def _reducing(name: str, attrs: Any, types: Sequence[Any], _result: Any) -> Rule:
    ndim = int(types[0].ndim)
    axes = {int(axis) % ndim for axis in (range(ndim) if attrs.axis is None else attrs.axis)}
    labels = tuple(range(ndim))
    kept = tuple(axis for axis in labels if axis not in axes)
    result = tuple(None if axis in axes else axis for axis in labels) if attrs.keepdims else kept

    def keeps(here: Sequence[Placement]) -> bool:
        return str(here[0]) == "P[sum]"

    if name == "sum":
        return Rule((labels,), result, summed=frozenset(axes), keeps=keeps)
    return Rule((labels,), result, whole=frozenset(axes))


_RULES: Final[dict[str, Callable[[str, Any, Sequence[Any], Any], Rule]]] = {
    **dict.fromkeys((*UNARY, *BROADCASTING), _elementwise),
    "matmul": _matmul,
    "permute_dims": _permute_dims,
    **dict.fromkeys(_ALONG, _softmax),
    **dict.fromkeys(_NORMS, _norm),
    **dict.fromkeys(_REDUCING, _reducing),
}
