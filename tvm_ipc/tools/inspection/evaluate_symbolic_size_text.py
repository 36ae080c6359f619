# SPDX-License-Identifier: Apache-2.0
"""Evaluate symbolic sizes that are given as text.

Passes report sizes as TVM prints them, for example `n * T.int64(4096)`. Reports need a number for
`n`: its upper bound, a value that the user specifies, or `UNKNOWN`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

#: The value of a symbolic size without an upper bound or a specified value.
UNKNOWN: Final = 128

_OPERATORS: Final[dict[type[ast.AST], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_CHOICES: Final = frozenset({"if_then_else", "Select"})


def variables(text: str) -> set[str]:
    """Return the names of the symbolic variables in a size; none if it cannot be parsed."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {"T"}


def evaluate(text: str, sizes: Mapping[str, int]) -> int | None:
    """Return the value of a size for the given variables; None if it cannot be evaluated."""
    try:
        value = _value(ast.parse(text, mode="eval").body, sizes)
    except (ArithmeticError, LookupError, SyntaxError, ValueError, RecursionError):
        return None
    return int(value)


def _value(node: ast.AST, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return sizes.get(node.id, UNKNOWN)
    if isinstance(node, ast.BinOp):
        return int(_OPERATORS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, sizes)
    if isinstance(node, ast.Compare):
        compare = _OPERATORS[type(node.ops[0])]
        return int(compare(_value(node.left, sizes), _value(node.comparators[0], sizes)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _call(node.func.attr, node.args, sizes)
    raise ValueError(ast.dump(node))


def _call(name: str, arguments: list[ast.expr], sizes: Mapping[str, int]) -> int:
    values = [_value(a, sizes) for a in arguments if not _is_text(a)]
    if name in ("min", "max"):
        return min(values) if name == "min" else max(values)
    if name in ("Div", "truncdiv", "floordiv"):
        return values[0] // values[1]
    if name in ("Mod", "truncmod", "floormod"):
        return values[0] % values[1]
    if name == "ceildiv":
        return -(-values[0] // values[1])
    if name in _CHOICES:
        return values[1] if values[0] else values[2]
    if len(values) == 1:
        return values[0]  # a cast, or a typed constant
    raise ValueError(name)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
