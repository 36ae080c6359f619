# SPDX-License-Identifier: Apache-2.0
"""Evaluate expressions of shape variables at sample points, for example to find counterexamples."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx

from tvm_ipc.tvm_moved_names import (
    BitwiseAnd,
    BitwiseNot,
    BitwiseOr,
    BitwiseXor,
    LShift,
    RShift,
    TensorLoad,
)

_UNIFORM = (64, 1)
_SMALL = 5
_GRID = _SMALL**3
_SCATTERED = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 31, 33, 64, 100, 128, 1000, 100_000)
#: The number of sample points: two at which all variables are equal, all small values of three
#: variables, and pseudorandom ones.
POINTS = len(_UNIFORM) + _GRID + 96


def coordinate(point: int, variable: int) -> int:
    """Return the value of a variable, by its index, at a sample point."""
    if point < len(_UNIFORM):
        return _UNIFORM[point]
    grid_point = point - len(_UNIFORM)
    if grid_point < _GRID:
        return int(grid_point // _SMALL ** (variable % 3) % _SMALL)
    return random.Random(point * 1009 + variable).choice(_SCATTERED)


def evaluate(
    expr: Any,
    value_of: Callable[[Any], int | None],
    loaded: Callable[[Any], int | None] = lambda _: None,
) -> int | None:
    """Return the value of an integer expression, None if it has none or its kind is unknown.

    `value_of` returns the value of a variable, `loaded` that of a load from memory.
    """
    kind = type(expr)
    if kind is tirx.IntImm:
        return int(expr.value)
    if isinstance(expr, tvm.ir.Var):
        return value_of(expr)
    if kind is TensorLoad:
        return loaded(expr)
    if kind is tirx.Cast:
        return evaluate(expr.value, value_of, loaded)
    if kind in _BINARY:
        operands, function = [expr.a, expr.b], _BINARY[kind]
    elif kind is tirx.Select:
        operands, function = [expr.condition, expr.true_value, expr.false_value], _select
    elif kind is tvm.ir.Call and getattr(expr.op, "name", "") in _CALLS:
        operands, function = list(expr.args), _CALLS[expr.op.name]
    elif kind in _UNARY:
        operands, function = [expr.a], _UNARY[kind]
    else:
        return None
    values = [evaluate(operand, value_of, loaded) for operand in operands]
    try:
        return None if None in values else int(function(*values))
    except (ArithmeticError, ValueError):  # a division by 0, or a shift by a negative number
        return None


def _select(condition: int, then: int, otherwise: int) -> int:
    return then if condition else otherwise


def _divide_toward_zero(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) is (b < 0) else -1)


_UNARY: dict[Any, Callable[..., int]] = {
    BitwiseNot: operator.invert,
    tirx.Not: operator.not_,
}
_CALLS: dict[str, Callable[..., int]] = {"prim.if_then_else": _select}
_BINARY: dict[Any, Callable[..., int]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
    tirx.Div: _divide_toward_zero,
    tirx.Mod: lambda a, b: a - b * _divide_toward_zero(a, b),
    tirx.Min: min,
    tirx.Max: max,
    LShift: operator.lshift,
    RShift: operator.rshift,
    BitwiseAnd: operator.and_,
    BitwiseOr: operator.or_,
    BitwiseXor: operator.xor,
    tirx.EQ: operator.eq,
    tirx.NE: operator.ne,
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
    tirx.And: lambda a, b: bool(a) and bool(b),
    tirx.Or: lambda a, b: bool(a) or bool(b),
}
