# SPDX-License-Identifier: Apache-2.0
"""What an expression of shape variables is where these have certain values."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx

_FIRST = (64, 1)
_SMALL = 5
_GRID = _SMALL**3
_SCATTERED = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 31, 33, 64, 100, 128, 1000, 100_000)
#: How many points are looked at: two, all small ones of three variables, and scattered ones.
POINTS = len(_FIRST) + _GRID + 96


def coordinate(point: int, variable: int) -> int:
    """Return the value that a variable has at a point."""
    if point < len(_FIRST):
        return _FIRST[point]
    place = point - len(_FIRST)
    if place < _GRID:
        return int(place // _SMALL ** (variable % 3) % _SMALL)
    return random.Random(point * 1009 + variable).choice(_SCATTERED)


def evaluate(
    expr: Any,
    value_of: Callable[[Any], int | None],
    loaded: Callable[[Any], int | None] = lambda _: None,
) -> int | None:
    """Return the value of an integer expression, None where it has none or is of a kind unknown.

    Variables have the values, and loads from memory give what is loaded, that the functions say.
    """
    kind = type(expr)
    if kind is tirx.IntImm:
        return int(expr.value)
    if isinstance(expr, tvm.ir.Var):
        return value_of(expr)
    if kind is tvm.ir.TensorLoad:
        return loaded(expr)
    if kind is tirx.Cast:
        return evaluate(expr.value, value_of, loaded)
    if kind in _BINARY:
        parts, function = [expr.a, expr.b], _BINARY[kind]
    elif kind is tirx.Select:
        parts, function = [expr.condition, expr.true_value, expr.false_value], _choose
    elif kind is tvm.ir.Call and getattr(expr.op, "name", "") in _CALLS:
        parts, function = list(expr.args), _CALLS[expr.op.name]
    elif kind in _UNARY:
        parts, function = [expr.a], _UNARY[kind]
    else:
        return None
    found = [evaluate(part, value_of, loaded) for part in parts]
    try:
        return None if None in found else int(function(*found))
    except (ArithmeticError, ValueError):  # no quotient by 0, no shift by less
        return None


def _choose(condition: int, then: int, otherwise: int) -> int:
    return then if condition else otherwise


def _truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) is (b < 0) else -1)


_UNARY: dict[Any, Callable[..., int]] = {
    tirx.BitwiseNot: operator.invert,
    tirx.Not: operator.not_,
}
_CALLS: dict[str, Callable[..., int]] = {"prim.if_then_else": _choose}
_BINARY: dict[Any, Callable[..., int]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
    tirx.Div: _truncated,
    tirx.Mod: lambda a, b: a - b * _truncated(a, b),
    tirx.Min: min,
    tirx.Max: max,
    tirx.LShift: operator.lshift,
    tirx.RShift: operator.rshift,
    tirx.BitwiseAnd: operator.and_,
    tirx.BitwiseOr: operator.or_,
    tirx.BitwiseXor: operator.xor,
    tirx.EQ: operator.eq,
    tirx.NE: operator.ne,
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
    tirx.And: lambda a, b: bool(a) and bool(b),
    tirx.Or: lambda a, b: bool(a) or bool(b),
}
