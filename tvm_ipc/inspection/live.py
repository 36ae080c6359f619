# SPDX-License-Identifier: Apache-2.0
"""How much memory a function cannot do without: the bytes of the tensors that are live at once.

This is a second opinion on the memory plan. It shares no code with the planner, and it errs to the
low side only: a tensor lives from the first call that is given it to the last one, on this rank;
what a call may keep in secret does not count. A plan whose storages take as many bytes as are live
in the worst moment could not be smaller, whatever its offsets.

Of the two sides of an `if`, one runs: what is live in the other does not count. What an `if`
returns counts as the larger of the two that it may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import tvm
from tvm import relax

from tvm_ipc.contract import IPC_MEMORY
from tvm_ipc.inspection.sizes import evaluate

_ALLOC = tvm.ir.Op.get("relax.builtin.alloc_tensor")
_STORAGE = tvm.ir.Op.get("relax.memory.alloc_storage")
_VIEWS = [
    tvm.ir.Op.get(f"relax.{name}")
    for name in ("reshape", "memory.view", "memory.ensure_zero_offset")
]
#: Neither gives a tensor of its own, nor uses one.
_NO_USE = [
    tvm.ir.Op.get(f"relax.memory.{name}")
    for name in ("alloc_tensor", "kill_tensor", "kill_storage")
]


@dataclass(frozen=True, eq=False)
class _Token:
    """Bytes that are live together."""

    scope: str
    bytes: int
    #: For what an `if` returns: what it is at the end of the one side, and of the other.
    sides: tuple[frozenset[_Token], ...] = ()


#: What a variable may stand for: tokens, or a tuple of such.
_Value: TypeAlias = "frozenset[_Token] | tuple[_Value, ...]"
_Live = frozenset[_Token]
_NOTHING: _Live = frozenset()


@dataclass
class Allocation:
    """What a function allocates, in bytes by memory scope."""

    #: storages of a plan
    storages: dict[str, int] = field(default_factory=dict)
    #: tensors with an allocation of their own, as many as are live at once; results not counted
    peak: dict[str, int] = field(default_factory=dict)
    #: tensors with an allocation of their own that are returned: no plan has a say in them
    results: dict[str, int] = field(default_factory=dict)

    def total(self) -> dict[str, int]:
        """Return what a plan may place, by scope."""
        scopes = sorted({*self.storages, *self.peak})
        return {s: self.storages.get(s, 0) + self.peak.get(s, 0) for s in scopes}


def allocations(
    mod: tvm.IRModule, given: Mapping[str, int], *, typed_ipc: bool = False
) -> dict[str, Allocation]:
    """Count what each Relax function of a module allocates, before or after a memory plan.

    Parameters
    ----------
    mod : the module, with its allocations explicit.
    given : values of symbolic variables; others count as their upper bound, see `sizes_of`.
    typed_ipc : a storage in `ipc_memory` counts as TVM's `LowerGPUIPCAllocStorage` has it
        allocated: it hands over bytes as if they were elements of the type that will lie there.
    """
    return {
        name.name_hint: _Function(function, sizes_of(function, given), typed_ipc).count()
        for name, function in mod.functions_items()
        if isinstance(function, relax.Function)
    }


def sizes_of(function: relax.Function, given: Mapping[str, int]) -> dict[str, int]:
    """Return the values of symbolic variables: what is given, else their upper bounds."""
    bounds = (function.attrs or {}).get("tir_var_upper_bound", {})
    return {**{str(name): int(bound) for name, bound in bounds.items()}, **given}


class _Function:
    """One function: a walk forward for what is what, one backward for what is live."""

    def __init__(self, function: relax.Function, sizes: Mapping[str, int], typed_ipc: bool) -> None:
        self.sizes, self.typed_ipc = sizes, typed_ipc
        self.body: relax.SeqExpr = function.body
        self.values: dict[relax.Var, _Value] = {}
        self.places: dict[relax.Var, int] = {}  # of bindings, in the order of the walk forward
        self.uses: list[_Live] = []  # by place
        self.births: list[_Live] = []  # by place: tokens that are used there first
        self.made: dict[_Token, int] = {}  # the place of the allocation
        self.unused: set[_Token] = set()
        self.escaped: set[_Token] = set()
        self.result = Allocation()

    def count(self) -> Allocation:
        returned = self._forward(self.body)
        self.result.results = _by_scope(_flat(returned))
        self.escaped = _closure(_flat(returned))
        self._backward(self.body, set())
        return self.result

    # Forward.

    def _forward(self, seq: relax.SeqExpr) -> _Value:
        for binding in _bindings(seq):
            place = self.places[binding.var] = len(self.places)
            self.uses.append(_NOTHING)
            self.births.append(_NOTHING)
            value, used = self._binding(binding.value, place)
            self.values[binding.var] = value
            self.uses[place] = used
            self.births[place] = frozenset(token for token in used if token in self.unused)
            self.unused -= self.births[place]
        return self._value(seq.body)

    def _binding(self, value: relax.Expr, place: int) -> tuple[_Value, _Live]:
        if isinstance(value, relax.If):
            sides = self._forward(value.true_branch), self._forward(value.false_branch)
            inner = frozenset[_Token]().union(*self.uses[place + 1 :])
            return self._merge(*sides, place), inner | _flat(self._value(value.cond))
        if not isinstance(value, relax.Call):
            return self._value(value), _NOTHING
        if value.op == _ALLOC:
            shape, dtype, _device, scope = value.args
            token = _Token(str(scope.value), self._bytes(shape, dtype))
            self.made[token] = place
            self.unused.add(token)
            return frozenset({token}), _NOTHING
        if value.op == _STORAGE:
            self._storage(value)
        if value.op == _STORAGE or value.op in _NO_USE:
            return _NOTHING, _NOTHING
        if value.op in _VIEWS:
            return self._value(value.args[0]), _NOTHING
        return _NOTHING, frozenset(t for a in value.args for t in _flat(self._value(a)))

    def _merge(self, left: _Value, right: _Value, place: int) -> _Value:
        """Return what an `if` at a place gives."""
        if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
            return tuple(self._merge(a, b, place) for a, b in zip(left, right, strict=True))
        both = _flat(left), _flat(right)
        outer = both[0] & both[1]
        sides = tuple(frozenset(t for t in s if self.made[t] > place) for s in both)
        largest = max(sides, key=_bytes)
        if not largest:
            return outer
        token = _Token(next(iter(largest)).scope, _bytes(largest), sides)
        self.made[token] = place
        return outer | {token}

    def _value(self, expr: relax.Expr) -> _Value:
        if isinstance(expr, relax.Var):
            return self.values.get(expr, _NOTHING)
        if isinstance(expr, relax.Tuple):
            return tuple(self._value(field) for field in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            whole = self._value(expr.tuple_value)
            return whole[expr.index] if isinstance(whole, tuple) else whole
        return _NOTHING

    def _bytes(self, shape: relax.Expr, dtype: relax.Expr) -> int:
        count = _itemsize(dtype)
        for dimension in shape.values if isinstance(shape, relax.ShapeExpr) else ():
            count *= self._number(dimension)
        return count

    def _storage(self, call: relax.Call) -> None:
        size, _device, scope, dtype = call.args
        count, name = self._number(size.values[0]), str(scope.value)
        if self.typed_ipc and name == IPC_MEMORY:
            count *= _itemsize(dtype)
        self.result.storages[name] = self.result.storages.get(name, 0) + count

    def _number(self, expr: tvm.ir.Expr) -> int:
        if isinstance(expr, tvm.tirx.IntImm):
            return int(expr.value)
        return evaluate(str(expr), self.sizes) or 0

    # Backward.

    def _backward(self, seq: relax.SeqExpr, live: set[_Token]) -> set[_Token]:
        """Return what is live before; `live` is what is live after, and is changed."""
        for binding in reversed(_bindings(seq)):
            place, value = self.places[binding.var], binding.value
            if isinstance(value, relax.If):
                live = self._if(binding, live)
                live |= _flat(self._value(value.cond))
            else:
                live |= self.uses[place]
            if self.uses[place]:
                self._peak(live)
            live -= self.births[place]
        return live

    def _if(self, binding: relax.Binding, after: set[_Token]) -> set[_Token]:
        given = {t for t in _flat(self.values[binding.var]) if t.sides and t in after}
        before: set[_Token] = set()
        for side, branch in enumerate((binding.value.true_branch, binding.value.false_branch)):
            here = (after - given).union(*(token.sides[side] for token in given))
            before |= self._backward(branch, here)
        return before

    def _peak(self, live: set[_Token]) -> None:
        for scope, total in _by_scope(live - self.escaped).items():
            self.result.peak[scope] = max(total, self.result.peak.get(scope, 0))


def _bindings(seq: relax.SeqExpr) -> list[relax.Binding]:
    return [binding for block in seq.blocks for binding in block.bindings]


def _flat(value: _Value) -> _Live:
    if isinstance(value, tuple):
        return frozenset(token for field in value for token in _flat(field))
    return value


def _closure(tokens: Iterable[_Token]) -> set[_Token]:
    """Return the tokens, and all that they may be."""
    found: set[_Token] = set()
    for token in tokens:
        found |= {token}.union(*(_closure(side) for side in token.sides))
    return found


def _by_scope(tokens: Iterable[_Token]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for token in tokens:
        totals[token.scope] = totals.get(token.scope, 0) + token.bytes
    return totals


def _bytes(tokens: Iterable[_Token]) -> int:
    return sum(token.bytes for token in tokens)


def _itemsize(dtype: relax.Expr) -> int:
    return int(tvm.DataType(str(dtype.value)).itemsize)
