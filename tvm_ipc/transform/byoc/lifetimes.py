# SPDX-License-Identifier: Apache-2.0
"""Where tensors of a function come from, and what may be overwritten.

A call may overwrite an argument if the function itself made it, in the same sequence of bindings,
and nothing looks at it afterwards, by that name or another. All else may still be wanted:
parameters belong to the caller; what a branch uses, and what was put into a tuple, viewed or
returned, lives on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import tvm
from tvm import relax

_ALLOC_TENSOR = tvm.ir.Op.get("relax.builtin.alloc_tensor")
#: Calls whose single result is a new tensor.
_MAKERS = (_ALLOC_TENSOR, *map(tvm.ir.Op.get, ("relax.call_tir", "relax.call_dps_packed")))
#: Operators that hand their arguments to a kernel, which keeps none of them.
_CALLERS = _MAKERS[1:]


@dataclass
class _Root:
    """A tensor, with all variables that are it."""

    sequence: int
    scope: str | None
    last_use: int = -1
    escapes: bool = False


@dataclass
class Lifetimes:
    """The tensors that a function makes."""

    _roots: dict[relax.Var, _Root] = field(default_factory=dict)
    _places: dict[relax.Var, tuple[int, int]] = field(default_factory=dict)
    _sequences: int = 0

    def scope(self, value: relax.Expr) -> str | None:
        """Return the memory scope that a tensor is known to be in."""
        root = self._roots.get(value) if isinstance(value, relax.Var) else None
        return None if root is None else root.scope

    def may_overwrite(self, value: relax.Expr, call: relax.Var) -> bool:
        """Return whether the call that is bound to a variable is the last to see a value."""
        root = self._roots.get(value) if isinstance(value, relax.Var) else None
        if root is None or root.escapes:
            return False
        return (root.sequence, root.last_use) == self._places[call]


def lifetimes(function: relax.Function, makers: set[tvm.ir.GlobalVar]) -> Lifetimes:
    """Analyze a function; calls of `makers` return new tensors too."""
    found = Lifetimes()
    _sequence(found, function.body, makers)
    return found


def _sequence(
    found: Lifetimes,
    body: relax.SeqExpr,
    makers: set[tvm.ir.GlobalVar],
) -> None:
    number, position = found._sequences, 0
    found._sequences += 1
    for block in body.blocks:
        for binding in block.bindings:
            value, var = binding.value, binding.var
            found._places[var] = (number, position)
            if isinstance(value, relax.Var) and value in found._roots:
                found._roots[var] = found._roots[value]
            elif isinstance(value, relax.If):
                _use(found, value.cond, number, position, escapes=False)
                _sequence(found, value.true_branch, makers)
                _sequence(found, value.false_branch, makers)
            elif isinstance(value, relax.Call):
                _call(found, value, makers, number, position)
                if value.op in _MAKERS or value.op in makers:
                    found._roots[var] = _Root(number, _scope(value))
            else:
                _use(found, value, number, position, escapes=True)
            position += 1
    _use(found, body.body, number, position, escapes=True)


def _call(
    found: Lifetimes,
    call: relax.Call,
    makers: set[tvm.ir.GlobalVar],
    number: int,
    position: int,
) -> None:
    keeps_nothing = (
        isinstance(call.op, relax.ExternFunc) or call.op in makers or call.op in _CALLERS
    )
    if isinstance(call.op, tvm.ir.GlobalVar) and call.op not in makers:
        # A kernel returns nothing; a Relax function may return what it was given.
        keeps_nothing = isinstance(call.ty, relax.TupleType) and not call.ty.fields
    for argument in call.args:
        fields = [argument]
        if call.op in _CALLERS and isinstance(argument, relax.Tuple):
            fields = list(argument.fields)
        for one in fields:
            _use(found, one, number, position, escapes=not keeps_nothing)


def _use(found: Lifetimes, value: relax.Expr, number: int, position: int, *, escapes: bool) -> None:
    if isinstance(value, relax.Var):
        root = found._roots.get(value)
        if root is not None:
            root.last_use = position
            root.escapes |= escapes or root.sequence != number
        return

    parts: list[relax.Expr] = []
    if isinstance(value, relax.Tuple):
        parts = list(value.fields)
    elif isinstance(value, relax.TupleGetItem):
        parts = [value.tuple_value]
    elif isinstance(value, relax.Function):
        parts = relax.analysis.free_vars(value)
    for part in parts:
        _use(found, part, number, position, escapes=True)


def _scope(call: relax.Call) -> str | None:
    return str(call.args[3].value) if call.op == _ALLOC_TENSOR else None
