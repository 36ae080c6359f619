# SPDX-License-Identifier: Apache-2.0
"""Compute the peak of live bytes of a function, a lower bound for every memory plan.

The computation shares no code with the planner and never overestimates. A tensor is live on its
rank from the first call that uses it to the last. A plan of as many bytes as the peak is optimal.

Only one branch of an `if` runs, so the tensors of the other one are not counted. A value that an
`if` returns counts as the larger of its two alternatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import tvm
from tvm import relax

from tvm_ipc.packed_functions import IPC_MEMORY
from tvm_ipc.tools.inspection.evaluate_symbolic_size_text import evaluate

_ALLOC = tvm.ir.Op.get("relax.builtin.alloc_tensor")
_STORAGE = tvm.ir.Op.get("relax.memory.alloc_storage")
_VIEWS = [
    tvm.ir.Op.get(f"relax.{name}")
    for name in ("reshape", "memory.view", "memory.ensure_zero_offset")
]
#: Operators that neither define a tensor nor use one.
_IGNORED = [
    tvm.ir.Op.get(f"relax.memory.{name}")
    for name in ("alloc_tensor", "kill_tensor", "kill_storage")
]


@dataclass(frozen=True, eq=False)
class _Token:
    """Bytes that become live, and stop being live, together."""

    scope: str
    bytes: int
    #: For a value that an `if` returns: the tokens that it stands for in each branch.
    branches: tuple[frozenset[_Token], ...] = ()


#: The tokens of a variable; a tuple has those of each field.
_Value: TypeAlias = "frozenset[_Token] | tuple[_Value, ...]"
_Live = frozenset[_Token]
_NOTHING: _Live = frozenset()


@dataclass
class Allocation:
    """The allocations of a function, in bytes by memory scope."""

    #: bytes of the storages of a plan
    storages: dict[str, int] = field(default_factory=dict)
    #: peak of the live tensors outside of storages, without results
    peak: dict[str, int] = field(default_factory=dict)
    #: returned tensors outside of storages, which no plan can change
    results: dict[str, int] = field(default_factory=dict)

    def total(self) -> dict[str, int]:
        """Return the bytes that a plan can change, by scope."""
        scopes = sorted({*self.storages, *self.peak})
        return {s: self.storages.get(s, 0) + self.peak.get(s, 0) for s in scopes}


def allocations(
    mod: tvm.IRModule, sizes: Mapping[str, int], *, typed_ipc: bool = False
) -> dict[str, Allocation]:
    """Count what each Relax function of a module allocates, before or after a memory plan.

    Parameters
    ----------
    mod : the module with explicit allocations.
    sizes : values of symbolic variables; others count as their upper bound, see `sizes_of`.
    typed_ipc : whether to count storages in `ipc_memory` as TVM's `LowerGPUIPCAllocStorage`
        allocates them: it passes the number of bytes as the number of elements.
    """
    return {
        name.name_hint: _Function(function, sizes_of(function, sizes), typed_ipc).count()
        for name, function in mod.functions_items()
        if isinstance(function, relax.Function)
    }


def sizes_of(function: relax.Function, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the values of symbolic variables: those in `sizes`, else their upper bounds."""
    bounds = (function.attrs or {}).get("tir_var_upper_bound", {})
    return {**{str(name): int(bound) for name, bound in bounds.items()}, **sizes}


class _Function:
    """The analysis of one function: a forward pass for values, a backward pass for liveness."""

    def __init__(self, function: relax.Function, sizes: Mapping[str, int], typed_ipc: bool) -> None:
        self.sizes, self.typed_ipc = sizes, typed_ipc
        self.body: relax.SeqExpr = function.body
        self.values: dict[relax.Var, _Value] = {}
        self.positions: dict[relax.Var, int] = {}  # of bindings, in forward order
        self.uses: list[_Live] = []  # by position
        self.births: list[_Live] = []  # by position: tokens whose first use is there
        self.allocated_at: dict[_Token, int] = {}
        self.unused: set[_Token] = set()
        self.escaped: set[_Token] = set()
        self.allocation = Allocation()

    def count(self) -> Allocation:
        """Return the allocations of the function."""
        returned = self._forward(self.body)
        self.allocation.results = _by_scope(_flat(returned))
        self.escaped = _closure(_flat(returned))
        self._backward(self.body, set())
        return self.allocation

    def _forward(self, seq: relax.SeqExpr) -> _Value:
        for binding in _bindings(seq):
            position = self.positions[binding.var] = len(self.positions)
            self.uses.append(_NOTHING)
            self.births.append(_NOTHING)
            value, used = self._binding(binding.value, position)
            self.values[binding.var] = value
            self.uses[position] = used
            self.births[position] = frozenset(token for token in used if token in self.unused)
            self.unused -= self.births[position]
        return self._value(seq.body)

    def _binding(self, value: relax.Expr, position: int) -> tuple[_Value, _Live]:
        if isinstance(value, relax.If):
            results = self._forward(value.true_branch), self._forward(value.false_branch)
            inner = frozenset[_Token]().union(*self.uses[position + 1 :])
            return self._merge(*results, position), inner | _flat(self._value(value.cond))
        if not isinstance(value, relax.Call):
            return self._value(value), _NOTHING
        if value.op == _ALLOC:
            shape, dtype, _device, scope = value.args
            token = _Token(str(scope.value), self._bytes(shape, dtype))
            self.allocated_at[token] = position
            self.unused.add(token)
            return frozenset({token}), _NOTHING
        if value.op == _STORAGE:
            self._storage(value)
        if value.op == _STORAGE or value.op in _IGNORED:
            return _NOTHING, _NOTHING
        if value.op in _VIEWS:
            return self._value(value.args[0]), _NOTHING
        return _NOTHING, frozenset(t for a in value.args for t in _flat(self._value(a)))

    def _merge(self, left: _Value, right: _Value, position: int) -> _Value:
        """Return the value of an `if` at a position."""
        if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
            return tuple(self._merge(a, b, position) for a, b in zip(left, right, strict=True))
        both = _flat(left), _flat(right)
        outer = both[0] & both[1]
        branches = tuple(
            frozenset(t for t in tokens if self.allocated_at[t] > position) for tokens in both
        )
        largest = max(branches, key=_total_bytes)
        if not largest:
            return outer
        token = _Token(next(iter(largest)).scope, _total_bytes(largest), branches)
        self.allocated_at[token] = position
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
            count *= self._evaluate(dimension)
        return count

    def _storage(self, call: relax.Call) -> None:
        size, _device, scope, dtype = call.args
        count, name = self._evaluate(size.values[0]), str(scope.value)
        if self.typed_ipc and name == IPC_MEMORY:
            count *= _itemsize(dtype)
        self.allocation.storages[name] = self.allocation.storages.get(name, 0) + count

    def _evaluate(self, expr: tvm.ir.Expr) -> int:
        if isinstance(expr, tvm.tirx.IntImm):
            return int(expr.value)
        return evaluate(str(expr), self.sizes) or 0

    def _backward(self, seq: relax.SeqExpr, live: set[_Token]) -> set[_Token]:
        """Return the tokens that are live before `seq`; `live`, those after it, is modified."""
        for binding in reversed(_bindings(seq)):
            position, value = self.positions[binding.var], binding.value
            if isinstance(value, relax.If):
                live = self._if(binding, live)
                live |= _flat(self._value(value.cond))
            else:
                live |= self.uses[position]
            if self.uses[position]:
                self._update_peak(live)
            live -= self.births[position]
        return live

    def _if(self, binding: relax.Binding, after: set[_Token]) -> set[_Token]:
        returned = {t for t in _flat(self.values[binding.var]) if t.branches and t in after}
        before: set[_Token] = set()
        for index, branch in enumerate((binding.value.true_branch, binding.value.false_branch)):
            live = (after - returned).union(*(token.branches[index] for token in returned))
            before |= self._backward(branch, live)
        return before

    def _update_peak(self, live: set[_Token]) -> None:
        for scope, total in _by_scope(live - self.escaped).items():
            self.allocation.peak[scope] = max(total, self.allocation.peak.get(scope, 0))


def _bindings(seq: relax.SeqExpr) -> list[relax.Binding]:
    return [binding for block in seq.blocks for binding in block.bindings]


def _flat(value: _Value) -> _Live:
    if isinstance(value, tuple):
        return frozenset(token for field in value for token in _flat(field))
    return value


def _closure(tokens: Iterable[_Token]) -> set[_Token]:
    """Return the tokens, and the tokens that they stand for in branches."""
    result: set[_Token] = set()
    for token in tokens:
        result |= {token}.union(*(_closure(branch) for branch in token.branches))
    return result


def _by_scope(tokens: Iterable[_Token]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for token in tokens:
        totals[token.scope] = totals.get(token.scope, 0) + token.bytes
    return totals


def _total_bytes(tokens: Iterable[_Token]) -> int:
    return sum(token.bytes for token in tokens)


def _itemsize(dtype: relax.Expr) -> int:
    return int(tvm.DataType(str(dtype.value)).itemsize)
